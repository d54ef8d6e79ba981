-- Forget an older epoch: all of it is booked.
--
-- KEYS[1]  fence
-- KEYS[2]  epochs of this store
-- then, for each lane of the epoch:
-- KEYS     its dirty set
-- ARGV[1]  fingerprint
-- ARGV[2]  epoch
-- Flags    allow-oom: it frees memory, so a full store runs it as well
-- Returns  {'fenced'} | 1 | 0 if the epoch has something to report after all
--
-- Work may be committed late to a hold of the epoch; then its dirty set exists again. This script looks at all sets at
-- one moment.

return function()
  if redis.call('HGET', KEYS[1], 'fingerprint') ~= ARGV[1] then return {'fenced'} end
  for i = 3, #KEYS do
    if redis.call('EXISTS', KEYS[i]) == 1 then return 0 end
  end
  redis.call('HDEL', KEYS[2], ARGV[2])
  return 1
end
