-- Report the state of slots that regions share.
--
-- KEYS[1]  fence
-- then, for each quota:
-- KEYS     the three keys of its slots (algorithms/concurrency)
-- KEYS     the demands of its agents
-- ARGV[1]  fingerprint
-- ARGV[2]  epoch
-- ARGV[3]  the agent
-- then, for each quota:
-- ARGV     limit
-- ARGV     slot_ttl, ms
-- ARGV     base share
-- ARGV     units that this agent could not get lately
-- Returns  {'fenced'} | {'reported', mono, for each quota: number of the share (0: none), the units that may be in use
--          (the share, or what is in use if that is more), the units wanted, ms for which forgotten slots may still be
--          in use}
--
-- Nothing is given up here: the coordinator's next share lowers what the region may take, and holders keep their slots.

local clock, slots = require('parts/clock'), require('algorithms/concurrency')
local add_demand = require('parts/regional_demand')

local function whole(number) return string.format('%.0f', number) end

return function()
  local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch', 'mono', 'last', 'data_lost_at')
  if fence[1] ~= ARGV[1] or fence[2] ~= ARGV[2] then return {'fenced'} end
  local mono = clock.read(fence[3], fence[4], fence[5])
  local answer = {'reported', whole(mono)}
  for i = 0, (#KEYS - 1) / 4 - 1 do
    local key, at = 2 + 4 * i, 4 + 4 * i
    local state = slots.look(key, at)
    local demand = add_demand(KEYS[key + 3], ARGV[3], ARGV[at + 3], mono)
    answer[#answer + 1] = whole(state.share and state.share.number or 0)
    answer[#answer + 1] = whole(math.max(state.limit, state.used))
    answer[#answer + 1] = whole(state.used + demand)
    answer[#answer + 1] = whole(slots.forgotten_ms(ARGV[at + 1] * 1000))
  end
  return answer
end
