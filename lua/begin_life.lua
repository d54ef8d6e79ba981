-- Begin a new life of the store, or find that this life has begun already.
--
-- KEYS  1 the fence
-- ARGV  1 fingerprint of the connection, read again just before   2 a fresh nonce
--       3 the nonce of a life that is over though its fingerprint is the same, or ''
-- Gives {nonce, epoch or '', lanes or ''} of this life: the fresh nonce if the life is new, else the one it has.
--
-- A new life clears the epoch: nothing is admitted until the coordinator has issued another. The clock stays. Whoever
-- found that the store has lost data names the nonce to be replaced; of several that did, one replaces it.

local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'nonce', 'epoch', 'lanes')
if fence[1] == ARGV[1] and fence[2] ~= ARGV[3] then return {fence[2], fence[3] or '', fence[4] or ''} end
redis.call('HSET', KEYS[1], 'fingerprint', ARGV[1], 'nonce', ARGV[2])
redis.call('HDEL', KEYS[1], 'epoch', 'lanes')
return {ARGV[2], '', ''}
