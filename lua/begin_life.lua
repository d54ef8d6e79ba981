-- Begin a new life of the store, or find that this life has begun already.
--
-- KEYS  1 the fence
-- ARGV  1 fingerprint of the connection, read again just before   2 a fresh nonce
-- Gives {nonce, epoch or '', lanes or ''} of this life: the fresh nonce if the life is new, else the one it has.
--
-- A new life clears the epoch: nothing is admitted until the coordinator has issued another. The clock stays.

local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'nonce', 'epoch', 'lanes')
if fence[1] == ARGV[1] then return {fence[2], fence[3] or '', fence[4] or ''} end
redis.call('HSET', KEYS[1], 'fingerprint', ARGV[1], 'nonce', ARGV[2])
redis.call('HDEL', KEYS[1], 'epoch', 'lanes')
return {ARGV[2], '', ''}
