-- Let the epoch go on in another incarnation of a store that has certainly kept all of it.
--
-- KEYS  1 the fence
-- ARGV  1 fingerprint of the incarnation before   2 nonce   3 epoch   4 fingerprint of this incarnation
-- Gives 1, also if it was done already; or 0 if the fence is another by now, or the store was not exempt.

local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'nonce', 'epoch', 'exempt')
if fence[1] ~= ARGV[1] and fence[1] ~= ARGV[4] then return 0 end
if fence[2] ~= ARGV[2] or fence[3] ~= ARGV[3] or fence[4] ~= '1' then return 0 end
redis.call('HSET', KEYS[1], 'fingerprint', ARGV[4])
return 1
