-- The demand of a region for a shared quota: the sum of what its agents reported last.
--
-- KEYS     none
-- ARGV     none
-- Returns  a function of the demands' key, the agent, its demand (a number as text) and the clock, which returns the
--          sum
--
-- A report that is ten seconds old does not count any more.

local FRESH_US, FORGOTTEN_MS = 10000000, 20000

return function(key, agent, demand, mono)
  redis.call('HSET', key, agent, string.format('%.0f', mono) .. ' ' .. demand)
  redis.call('PEXPIRE', key, FORGOTTEN_MS)
  local sum, all = 0, redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    local at, units = string.match(all[i + 1], '^(%d+) (%d+)$')
    if mono - tonumber(at) > FRESH_US then redis.call('HDEL', key, all[i]) else sum = sum + tonumber(units) end
  end
  return sum
end
