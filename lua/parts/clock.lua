-- The store's clock, which never goes back: a jump back stands still, and a jump forward counts.
--
-- KEYS  1 the fence
-- ARGV  none
-- Gives a function of the fence's `mono` and `last`: the clock now and the store's TIME, both in microseconds
--
-- The fence is written when a millisecond has passed, or when TIME has gone back: a write in each call would cost as
-- much as a decision. So after a jump back the clock may repeat what is left of a millisecond. It never gains, and who
-- computes with it takes an elapsed time below zero for zero.

return function(mono, last)
  local time = redis.call('TIME')
  local now = time[1] * 1000000 + time[2]
  local elapsed = last and now - last
  mono = tonumber(mono or 0) + math.max(0, elapsed or 0)
  if not elapsed or elapsed >= 1000 or elapsed < 0 then
    redis.call('HSET', KEYS[1], 'mono', string.format('%.0f', mono), 'last', string.format('%.0f', now))
  end
  return mono, now
end
