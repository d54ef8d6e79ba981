-- Write the epoch that the coordinator issued to this incarnation of the store.
--
-- KEYS[1]  fence
-- KEYS[2]  epochs of this store
-- ARGV[1]  fingerprint
-- ARGV[2]  nonce
-- ARGV[3]  epoch
-- ARGV[4]  number of lanes
-- ARGV[5]  1: the store is exempt (it is alone, and fsyncs every write); else 0
-- ARGV[6]  1: the store may not know of something that was admitted before; else 0
-- Returns  1, or 0 if the store is another incarnation by now: then the epoch is not for it

local clock = require('parts/clock')

return function()
  local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'nonce', 'mono', 'last')
  if fence[1] ~= ARGV[1] or fence[2] ~= ARGV[2] then return 0 end
  redis.call('HSET', KEYS[1], 'epoch', ARGV[3], 'lanes', ARGV[4], 'exempt', ARGV[5])
  redis.call('HDEL', KEYS[1], 'kept_epoch', 'promoted')
  if ARGV[6] == '1' then
    local mono = clock.read(fence[3], fence[4])
    redis.call('HSET', KEYS[1], 'data_lost_at', string.format('%.0f', mono))
  end
  redis.call('HSET', KEYS[2], ARGV[3], ARGV[4])
  return 1
end
