-- Find the record of an operation over several cells, in the cell that remembers it. Nothing changes.
--
-- KEYS[1]  fence
-- KEYS[2]  the operation's record
-- ARGV[1]  fingerprint
-- ARGV[2]  digest of the operation's body
-- Returns  {'fenced'} | {'unknown'} | {'another_body'} | {'known', 1 if all that was set aside is spent, else 0, ms
--          until what was set aside runs out, the id of its hold}

local clock = require('parts/clock')

return function()
  local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'mono', 'last')
  if fence[1] ~= ARGV[1] then return {'fenced'} end
  local known = redis.call('GET', KEYS[2])
  if not known then return {'unknown'} end
  local head = #ARGV[2]
  if string.sub(known, 1, head) ~= ARGV[2] or #known < head + 10 then return {'another_body'} end

  local mono = clock.read(fence[2], fence[3])
  local due, length, after = struct.unpack('<dI2', string.sub(known, head + 1))
  local id = string.sub(known, head + after, head + after + length - 1)
  return {'known', due == 0 and 1 or 0, math.max(0, math.ceil((due - mono) / 1000)), id}
end
