-- Claim operations that were admitted without the store: from now on no script charges them.
--
-- KEYS[1]  fence
-- then, for each operation:
-- KEYS     its record
-- ARGV[1]  fingerprint
-- ARGV[2]  claimant
-- then, for each operation:
-- ARGV     digest of its body
-- ARGV     how long it is remembered, ms
-- Returns  {'fenced'} | {'claims', for each operation: claimed | charged | another_body …}
--
-- An operation is claimed once, and the same claimant gets the same reply again. It is `charged` if a script has
-- executed it, or if another claimant has it. A script that finds a claim charges nothing, as if it had executed the
-- operation before, so it makes no difference whether a call that timed out is executed before or after this one.

local function claim(record, claimant, body, remembered_ms)
  local known = redis.call('GET', record)
  if known == body .. claimant then return 'claimed' end
  if known then return string.sub(known, 1, #body) == body and 'charged' or 'another_body' end
  redis.call('SET', record, body .. claimant, 'PX', remembered_ms)
  return 'claimed'
end

return function()
  if redis.call('HGET', KEYS[1], 'fingerprint') ~= ARGV[1] then return {'fenced'} end
  local answer = {'claims'}
  for i = 2, #KEYS do answer[i] = claim(KEYS[i], ARGV[2], ARGV[2 * i - 1], ARGV[2 * i]) end
  return answer
end
