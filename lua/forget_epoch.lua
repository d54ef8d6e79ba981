-- Forget an older epoch: all of it is booked.
--
-- KEYS  1 the fence   2 the epochs that this store has ever had   then the dirty sets of all its lanes
-- ARGV  1 fingerprint   2 epoch
-- Gives 1, or 0 if there is something to report of it after all, or {'fenced'}
--
-- Work may be committed late to a hold of it: then it is known again, and has a dirty set. Here both are looked at in
-- one moment.

if redis.call('HGET', KEYS[1], 'fingerprint') ~= ARGV[1] then return {'fenced'} end
for i = 3, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then return 0 end
end
redis.call('HDEL', KEYS[2], ARGV[2])
return 1
