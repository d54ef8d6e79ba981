-- Continue the epoch in another incarnation of a store that has certainly kept all of its data.
--
-- KEYS[1]  fence
-- ARGV[1]  fingerprint of the incarnation before
-- ARGV[2]  nonce
-- ARGV[3]  epoch
-- ARGV[4]  fingerprint of this incarnation
-- Returns  1, also if it was done before; 0 if the fence has changed, or the store was not exempt

return function()
  local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'nonce', 'epoch', 'exempt')
  if fence[1] ~= ARGV[1] and fence[1] ~= ARGV[4] then return 0 end
  if fence[2] ~= ARGV[2] or fence[3] ~= ARGV[3] or fence[4] ~= '1' then return 0 end
  redis.call('HSET', KEYS[1], 'fingerprint', ARGV[4])
  return 1
end
