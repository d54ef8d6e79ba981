-- Write down the epoch that the coordinator issued to this incarnation of the store.
--
-- KEYS  1 the fence   2 the epochs that this store has ever had
-- ARGV  1 fingerprint   2 nonce   3 epoch   4 lanes   5 1 if the store is exempt: alone, and fsyncing every write; or 0
--       6 1 if something may have been admitted in its place that it does not know; or 0
-- Gives 1, or 0 if the store is another incarnation by now: then the epoch is not for it.

local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'nonce', 'mono', 'last')
if fence[1] ~= ARGV[1] or fence[2] ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'epoch', ARGV[3], 'lanes', ARGV[4], 'exempt', ARGV[5])
redis.call('HDEL', KEYS[1], 'whole')
if ARGV[6] == '1' then
  local mono = require('parts/clock')(fence[3], fence[4])
  redis.call('HSET', KEYS[1], 'lost_at', string.format('%.0f', mono))
end
redis.call('HSET', KEYS[2], ARGV[3], ARGV[4])
return 1
