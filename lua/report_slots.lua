-- Say how it stands with slots that are shared over regions.
--
-- KEYS  1 the fence   then, for each quota in turn: its slots' three (algorithms/concurrency), what its agents want
-- ARGV  1 fingerprint   2 epoch   3 the agent
--       then, for each quota in turn: limit, slot_ttl and safe share as algorithms/concurrency has them, the units that
--         were asked for in vain of this agent lately
-- Gives {'fenced'} | {'reported', mono, for each quota: the number of the share (0: none), the units that may be in use
--       (the share, or what is in use if that is more), those that are wanted, for how many ms yet slots may be in use
--       that this store has forgotten}
--
-- Nothing is given up here: the coordinator's next word says what the region may take, and whoever works goes on.

local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch', 'mono', 'last', 'lost_at')
if fence[1] ~= ARGV[1] or fence[2] ~= ARGV[2] then return {'fenced'} end
local mono, now = require('parts/clock')(fence[3], fence[4])
local slots = require('parts/algorithms')(mono, now, fence[5])('concurrency')
local function whole(number) return string.format('%.0f', number) end

local answer = {'reported', whole(mono)}
for i = 0, (#KEYS - 1) / 4 - 1 do
  local key, at = 2 + 4 * i, 4 + 4 * i
  local state = slots.look(key, at)
  local wanted = require('parts/regional_demand')(KEYS[key + 3], ARGV[3], ARGV[at + 3], mono)
  answer[#answer + 1] = whole(state.share and state.share.number or 0)
  answer[#answer + 1] = whole(math.max(state.limit, state.used))
  answer[#answer + 1] = whole(state.used + wanted)
  answer[#answer + 1] = whole(slots.lost_ms(ARGV[at + 1] * 1000))
end
return answer
