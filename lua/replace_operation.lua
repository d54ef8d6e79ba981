-- Write down that all of an operation over several cells is spent, or that something was set aside for it anew.
--
-- KEYS  1 the fence   2 the operation's record
-- ARGV  1 fingerprint   2 hash of the operation's body   3 id of its hold as it was read   4 id of its hold from now on
--       5 1 if all that was set aside has been spent, or 0
-- Gives 1, or 0 if the record is another by now, or {'fenced'}
--
-- A record whose hold runs out at the moment 0 is that of an operation of which all is spent.

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
