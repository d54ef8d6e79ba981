-- Record that all of an operation over several cells is spent, or that something was set aside for it anew.
--
-- KEYS[1]  fence
-- KEYS[2]  the operation's record
-- ARGV[1]  fingerprint
-- ARGV[2]  digest of the operation's body
-- ARGV[3]  id of its hold as it was read
-- ARGV[4]  id of its hold from now on
-- ARGV[5]  1 if all that was set aside is spent, else 0
-- Returns  {'fenced'} | 1 | 0 if the record has changed
--
-- A record whose hold runs out at moment 0 is that of an operation that is spent completely.

return function()
  if redis.call('HGET', KEYS[1], 'fingerprint') ~= ARGV[1] then return {'fenced'} end
  local known, body = redis.call('GET', KEYS[2]), ARGV[2]
  if not known or string.sub(known, 1, #body) ~= body or #known < #body + 10 then return 0 end
  local due, length, after = struct.unpack('<dI2', string.sub(known, #body + 1))
  local begin = #body + after
  if string.sub(known, begin, begin + length - 1) ~= ARGV[3] then return 0 end
  if ARGV[5] == '1' then due = 0 end
  local record = body .. struct.pack('<dI2', due, #ARGV[4]) .. ARGV[4] .. string.sub(known, begin + length)
  redis.call('SET', KEYS[2], record, 'KEEPTTL')
  return 1
end
