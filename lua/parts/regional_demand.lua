-- What all agents of the region want of a quota that is shared, as each said it last.
--
-- KEYS  none
-- ARGV  none
-- Gives a function of the key of its demands, the agent, what it wants (a number as text) and the clock: the sum
--
-- What an agent wanted ten seconds ago does not count any more.

local FRESH_US, FORGOTTEN_MS = 10000000, 20000

return function(key, agent, wanted, mono)
  redis.call('HSET', key, agent, string.format('%.0f', mono) .. ' ' .. wanted)
  redis.call('PEXPIRE', key, FORGOTTEN_MS)
  local sum, all = 0, redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    local at, units = string.match(all[i + 1], '^(%d+) (%d+)$')
    if mono - tonumber(at) > FRESH_US then redis.call('HDEL', key, all[i]) else sum = sum + tonumber(units) end
  end
  return sum
end
