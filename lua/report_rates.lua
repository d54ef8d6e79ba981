-- Report the state of shared rates, after giving up what is not used of their shares.
--
-- KEYS[1]  fence
-- then, for each rate:
-- KEYS     its state
-- KEYS     the demands of its agents
-- ARGV[1]  fingerprint
-- ARGV[2]  epoch
-- ARGV[3]  the agent
-- then, for each rate:
-- ARGV     rate_micro of the base share
-- ARGV     burst of the base share
-- ARGV     this agent's demand, in micro-units a second
-- ARGV     1 if other regions want more than they have, else 0
-- Returns  {'fenced'} | {'reported', mono, for each rate: number of the share in force (0: none), its rate_micro, the
--          units spent since the first share, the demand here}
--
-- The demand here is the sum over all agents. Where others want more as well, it is corrected so that the bucket is
-- half full two seconds later: lowered by what the bucket holds beyond its half, or raised by what it lacks, an eighth
-- at most. A share above that is lowered to it, also for the time after it; nothing raises it from here.

local clock, shares = require('parts/clock'), require('parts/share')
local add_demand = require('parts/regional_demand')

local function whole(number) return string.format('%.0f', number) end

local HALF_FULL_IN_MS = 2000

local function corrected_by_level(state, demand)
  local over = shares.level(state) - state.burst * 500000000
  if over > 0 then return math.max(0, demand - math.floor(over / HALF_FULL_IN_MS)) end
  return demand + math.min(math.floor(demand / 8), math.floor(-over / HALF_FULL_IN_MS))
end

local function lower_share(key, state, rate_micro)
  local share = state.share
  if rate_micro >= share.rate_micro then return end
  shares.install(key, state, {number = share.number, rate_micro = rate_micro, ends = share.ends,
    after_micro = share.after_micro < 0 and share.after_micro or math.min(share.after_micro, rate_micro),
    kept = share.kept})
end

return function()
  local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch', 'mono', 'last')
  if fence[1] ~= ARGV[1] or fence[2] ~= ARGV[2] then return {'fenced'} end
  local mono = clock.read(fence[3], fence[4])
  local answer = {'reported', whole(mono)}
  for i = 0, (#KEYS - 1) / 2 - 1 do
    local key, at = KEYS[2 + 2 * i], 4 + 4 * i
    local state = shares.read(key, tonumber(ARGV[at]), tonumber(ARGV[at + 1]))
    local demand = add_demand(KEYS[3 + 2 * i], ARGV[3], ARGV[at + 2], mono)
    if ARGV[at + 3] == '1' then demand = corrected_by_level(state, demand) end
    if ARGV[at + 3] == '1' and state.share then lower_share(key, state, demand) end
    answer[#answer + 1] = state.share and whole(state.share.number) or '0'
    answer[#answer + 1] = whole(state.rate_micro)
    answer[#answer + 1] = state.share and whole(math.max(0, state.share.spent)) or '0'
    answer[#answer + 1] = whole(demand)
  end
  return answer
end
