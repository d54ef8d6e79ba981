-- Say how it stands with shared rates: first give up what is not used of their shares, and then tell of it.
--
-- KEYS  1 the fence   then, for each rate in turn: its state, what its agents want
-- ARGV  1 fingerprint   2 epoch   3 the agent
--       then, for each rate in turn: rate_micro and burst of the safe share, what this agent wants in millionths of a
--         unit a second, 1 if other regions want more than they have
-- Gives {'fenced'} | {'reported', mono, for each rate: the number of the share that is in force (0: none), its
--       rate_micro, the units spent since there was one, what is wanted here}
--
-- What is wanted here is what all agents want. Where others want more as well, it is less by what the bucket holds
-- beyond its half, or more by what it lacks of that (an eighth at most), so that it is half full two seconds later; and
-- a share above it is lowered to it: also for the time after it, and never to be raised from here.

local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch', 'mono', 'last')
if fence[1] ~= ARGV[1] or fence[2] ~= ARGV[2] then return {'fenced'} end
local mono = require('parts/clock')(fence[3], fence[4])
local shares = require('parts/share')
local function whole(number) return string.format('%.0f', number) end

local HALF_FULL_IN_MS = 2000

local function with_bucket(state, wanted)
  local over = shares.level(state) - state.burst * 500000000
  if over > 0 then return math.max(0, wanted - math.floor(over / HALF_FULL_IN_MS)) end
  return wanted + math.min(math.floor(wanted / 8), math.floor(-over / HALF_FULL_IN_MS))
end

local function lower(key, state, rate_micro)
  local share = state.share
  if rate_micro >= share.rate_micro then return end
  shares.give(key, state, {number = share.number, rate_micro = rate_micro, ends = share.ends,
    after_micro = share.after_micro < 0 and share.after_micro or math.min(share.after_micro, rate_micro),
    kept = share.kept})
end

local answer = {'reported', whole(mono)}
for i = 0, (#KEYS - 1) / 2 - 1 do
  local key, at = KEYS[2 + 2 * i], 4 + 4 * i
  local state = shares.read(key, tonumber(ARGV[at]), tonumber(ARGV[at + 1]), mono)
  local wanted = require('parts/regional_demand')(KEYS[3 + 2 * i], ARGV[3], ARGV[at + 2], mono)
  if ARGV[at + 3] == '1' then wanted = with_bucket(state, wanted) end
  if ARGV[at + 3] == '1' and state.share then lower(key, state, wanted) end
  answer[#answer + 1] = state.share and whole(state.share.number) or '0'
  answer[#answer + 1] = whole(state.rate_micro)
  answer[#answer + 1] = state.share and whole(math.max(0, state.share.spent)) or '0'
  answer[#answer + 1] = whole(wanted)
end
return answer
