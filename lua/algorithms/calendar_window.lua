-- A fixed window that begins with the calendar: so many units until it ends, and then again.
--
-- State    `started`, in milliseconds since 1970, and `used`. It expires when the window is over.
-- KEYS[1]  the packed state (parts/share)
-- ARGV[1]  rate_micro
-- ARGV[2]  units in a window: the base share
-- ARGV[3]  the window, ms
-- ARGV[4]  a moment at which a window begins, in milliseconds since 1970
-- ARGV[5]  when that window ends: a day of a time zone may have 23 or 25 hours
-- Returns  the algorithm. It is fixed_window but for the begin. Windows after the named one have their usual length. A
--          window that any agent has begun is never begun again, however much the agents' clocks differ.

local clock, number, share = require('parts/clock'), require('parts/number'), require('parts/share')
local fixed = require('algorithms/fixed_window')

local function look(key, at)
  local state = share.look(KEYS[key], share.LAYOUTS.calendar, number(ARGV[at]), number(ARGV[at + 1]))
  local window, begin, over = number(ARGV[at + 2]), number(ARGV[at + 3]), number(ARGV[at + 4])
  local now = math.floor(clock.now / 1000)
  if now >= over then
    begin = over + math.floor((now - over) / window) * window
    over = begin + window
  end
  local started, used = begin, 0
  if state.remembered ~= '' then started, used = struct.unpack('<dd', state.remembered) end
  if started < begin then started, used = begin, 0 end
  state.started, state.used, state.left_ms = started, used, over - now
  return state
end

return {keys = 1, arguments = 5, look = look, refuse = fixed.refuse, take = fixed.take, keep = fixed.keep,
  tell = fixed.tell}
