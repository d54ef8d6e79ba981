-- The store's clock, which never goes back: it stands still when TIME jumps back, and counts a jump forward.
--
-- KEYS[1]  fence
-- ARGV     none
-- Returns  the clock: `mono`, its moment, and `now`, the store's TIME, in microseconds; `data_lost_at`, when the store
--          last lost data, or nil; `calls`, how often it was read; and `read`, a function of the fence's `mono`, `last`
--          and `data_lost_at`, which returns `mono`
--
-- Each script reads it once, before all that depends on the time: it stands still until the next call.
--
-- The fence is written when a millisecond has passed, or when TIME went back: a write in each call would cost as much
-- as a decision. So after a jump back the clock may repeat what is left of a millisecond. It never gains time, and
-- scripts take a negative elapsed time for zero.

local clock = {mono = 0, now = 0, calls = 0}

function clock.read(mono, last, data_lost_at)
  local time = redis.call('TIME')
  local now = time[1] * 1000000 + time[2]
  local elapsed = last and now - last
  mono = tonumber(mono or 0) + math.max(0, elapsed or 0)
  if not elapsed or elapsed >= 1000 or elapsed < 0 then
    redis.call('HSET', KEYS[1], 'mono', string.format('%.0f', mono), 'last', string.format('%.0f', now))
  end
  clock.mono, clock.now, clock.calls = mono, now, clock.calls + 1
  clock.data_lost_at = data_lost_at and tonumber(data_lost_at)
  return mono
end

return clock
