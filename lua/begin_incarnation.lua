-- Begin a new incarnation of the store, or find that it has begun already.
--
-- KEYS[1]  fence
-- ARGV[1]  fingerprint of the connection, read just before
-- ARGV[2]  a fresh nonce
-- ARGV[3]  the nonce of an incarnation that is over although its fingerprint is the same; else ''
-- ARGV[4]  the epoch until now, if the store has certainly kept all of its data; else ''
-- ARGV[5]  the format of keys that the agent knows
-- ARGV[6]  why the epoch is kept, if this store is a promoted replica (JSON); else ''
-- Returns  {fingerprint, nonce, epoch, lanes, kept_epoch, exempt, format, promoted}: the fresh nonce if the incarnation
--          is new, else what the fence has. `kept_epoch` is the epoch before, where all data of it was certainly kept
--
-- A new incarnation clears the epoch: nothing is admitted until the coordinator has issued another. The clock stays. An
-- agent that found an incarnation to be over names the nonce to be replaced; if several did, one of them replaces it.
-- Agents may know different replicas of one store: the first to begin its incarnation decides which of them confirm.
-- A fence of a newer format stays as it is.

local function fence()
  return redis.call('HMGET', KEYS[1], 'fingerprint', 'nonce', 'epoch', 'lanes', 'kept_epoch', 'exempt', 'format',
    'promoted')
end

-- The fingerprint of the store, without the replicas that confirm its replies.
local function store_of(fingerprint) return fingerprint and string.match(fingerprint, '^[^+]*') end

return function()
  local before = fence()
  if tonumber(before[7] or '1') > tonumber(ARGV[5]) then return before end
  if store_of(before[1]) == store_of(ARGV[1]) and before[2] ~= ARGV[3] then return before end
  redis.call('HSET', KEYS[1], 'fingerprint', ARGV[1], 'nonce', ARGV[2], 'format', ARGV[5])
  redis.call('HDEL', KEYS[1], 'epoch', 'lanes', 'kept_epoch', 'exempt', 'promoted')
  if ARGV[4] ~= '' and before[3] == ARGV[4] then
    redis.call('HSET', KEYS[1], 'kept_epoch', ARGV[4], 'promoted', ARGV[6])
  end
  return fence()
end
