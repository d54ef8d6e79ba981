-- Note that the coordinator gave no answer. The store knows for all agents of the region since when.
--
-- KEYS[1]  fence
-- ARGV[1]  fingerprint
-- ARGV[2]  epoch
-- Returns  {'fenced'} | {'noted', 1 if the region is partitioned, the units overdrawn in this store}

local clock, partition = require('parts/clock'), require('parts/partition')

return function()
  local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch', 'mono', 'last', 'overdrawn')
  if fence[1] ~= ARGV[1] or fence[2] ~= ARGV[2] then return {'fenced'} end
  local mono = clock.read(fence[3], fence[4])
  partition.note(mono)
  return {'noted', partition.is_partitioned(mono) and 1 or 0, tonumber(fence[5] or 0)}
end
