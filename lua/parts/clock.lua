-- The store's clock, which never goes back: it stands still when TIME jumps back, and counts a jump forward.
--
-- KEYS[1]  fence
-- ARGV     none
-- Returns  a function of the fence's `mono` and `last`, which returns the clock and the store's TIME in microseconds
--
-- The fence is written when a millisecond has passed, or when TIME went back: a write in each call would cost as much
-- as a decision. So after a jump back the clock may repeat what is left of a millisecond. It never gains time, and
-- scripts take a negative elapsed time for zero.

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
