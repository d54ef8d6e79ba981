-- A sliding window counter: the units of this window, and the part of the previous window's that is still in sight.
--
-- State    `started`, when this window began; `current` and `previous`, the units of the two. It expires when both
--          windows are over.
-- KEYS[1]  the packed state (parts/share)
-- ARGV[1]  rate_micro
-- ARGV[2]  units in a window: the base share
-- ARGV[3]  the window, ms
-- Returns  the algorithm. It admits while current + previous × (1 − elapsed part of this window) is at most the limit,
--          in integers. It assumes that the previous window's units are evenly spread, so three numbers stand for any
--          traffic. Where every window must be exact, use sliding_log.

local clock, number, share = require('parts/clock'), require('parts/number'), require('parts/share')
local MAX_USED = 1000000000 -- beyond it adjustments are dropped: times the longest window it is still exact

local function look(key, at)
  local state = share.look(KEYS[key], share.LAYOUTS.sliding, number(ARGV[at]), number(ARGV[at + 1]))
  local window = tonumber(ARGV[at + 2])
  local mono, started, current, previous = clock.mono, clock.mono, 0, 0
  if state.remembered ~= '' then started, current, previous = struct.unpack('<ddd', state.remembered) end
  local elapsed_ms = math.max(0, math.floor((mono - started) / 1000))
  if elapsed_ms >= 2 * window then
    started, current, previous, elapsed_ms = mono, 0, 0, 0
  elseif elapsed_ms >= window then
    started, current, previous, elapsed_ms = started + window * 1000, 0, current, elapsed_ms - window
  end
  state.window, state.started, state.current, state.previous = window, started, current, previous
  state.left_ms = window - elapsed_ms
  return state
end

-- How many ms before its end the previous window has left this much room.
local function ms_before_end(room, previous, window)
  return previous > 0 and math.min(window, math.floor(room * window / previous)) or window
end

local function retry_ms(state, units)
  local room = state.burst - state.current - units
  if room >= 0 then return state.left_ms - ms_before_end(room, state.previous, state.window) end
  return state.left_ms + state.window - ms_before_end(state.burst - units, state.current, state.window)
end

-- The room in unit-milliseconds with so many units taken.
local function room_ms(state, units)
  return (state.burst - state.current - units) * state.window - state.previous * state.left_ms
end

local function refuse(state, cost, is_enforced)
  local units = state.taken + cost
  if units > state.burst and is_enforced then return 'cost_above_limit' end
  if room_ms(state, units) < 0 and is_enforced then return 'rate_exceeded', retry_ms(state, units) end
end

local function take(state)
  state.current = math.min(state.current + state.taken, MAX_USED)
  share.take(state)
end

local function keep(state, key)
  local remembered = struct.pack('<ddd', state.started, state.current, state.previous)
  share.keep(KEYS[key], state, remembered, state.left_ms + state.window)
end

local function tell(state, taken)
  local reset_ms = 0
  if state.current + taken > 0 then reset_ms = state.left_ms + state.window
  elseif state.previous > 0 then reset_ms = state.left_ms end
  return state.burst, math.max(0, math.floor(room_ms(state, taken) / state.window)), reset_ms
end

return {keys = 1, arguments = 3, look = look, refuse = refuse, take = take, keep = keep, tell = tell}
