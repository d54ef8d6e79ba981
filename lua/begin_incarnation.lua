-- Begin a new incarnation of the store, or find that this incarnation has begun already.
--
-- KEYS  1 the fence
-- ARGV  1 fingerprint of the connection, read again just before   2 a fresh nonce
--       3 the nonce of an incarnation that is over though its fingerprint is the same, or ''
--       4 the epoch until now, if the store has certainly kept all of it, or ''
-- Gives {fingerprint, nonce, epoch, lanes, whole, exempt} of this incarnation: the fresh nonce if it is new, else what
--       it has. `whole` is the epoch before, where that is certain.
--
-- A new incarnation clears the epoch: nothing is admitted until the coordinator has issued another. The clock stays. An
-- agent that found an incarnation to be over names the nonce to replace; of several that did, one replaces it.

local function fence()
  return redis.call('HMGET', KEYS[1], 'fingerprint', 'nonce', 'epoch', 'lanes', 'whole', 'exempt')
end

local was = fence()
if was[1] == ARGV[1] and was[2] ~= ARGV[3] then return was end
redis.call('HSET', KEYS[1], 'fingerprint', ARGV[1], 'nonce', ARGV[2])
redis.call('HDEL', KEYS[1], 'epoch', 'lanes', 'whole', 'exempt')
if ARGV[4] ~= '' and was[3] == ARGV[4] then redis.call('HSET', KEYS[1], 'whole', ARGV[4]) end
return fence()
