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
--
-- Time goes in steps of a millisecond, in a window of more than an hour in steps of a second: so units times steps are
-- counted exactly in the longest window.

local clock, number, share = require('parts/clock'), require('parts/number'), require('parts/share')
local MAX_USED = 250000000 -- beyond it adjustments are dropped: times the steps of 53 weeks it is still exact
local HOUR_MS = 3600000

local function look(key, at)
  local state = share.look(KEYS[key], share.LAYOUTS.sliding, number(ARGV[at]), number(ARGV[at + 1]))
  local window_ms = tonumber(ARGV[at + 2])
  local mono, started, current, previous = clock.mono, clock.mono, 0, 0
  if state.remembered ~= '' then started, current, previous = struct.unpack('<ddd', state.remembered) end
  local elapsed_ms = math.max(0, math.floor((mono - started) / 1000))
  if elapsed_ms >= 2 * window_ms then
    started, current, previous, elapsed_ms = mono, 0, 0, 0
  elseif elapsed_ms >= window_ms then
    started, current, previous, elapsed_ms = started + window_ms * 1000, 0, current, elapsed_ms - window_ms
  end
  local step_ms = window_ms > HOUR_MS and 1000 or 1
  state.window, state.step_ms, state.into_step_ms = window_ms / step_ms, step_ms, elapsed_ms % step_ms
  state.started, state.current, state.previous = started, current, previous
  state.left = state.window - math.floor(elapsed_ms / step_ms)
  return state
end

-- The time until so many steps have passed, from the one on that has begun.
local function ms_of(state, steps) return steps * state.step_ms - state.into_step_ms end

-- How many steps before its end the previous window has left this much room.
local function before_end(room, previous, window)
  return previous > 0 and math.min(window, math.floor(room * window / previous)) or window
end

local function retry_ms(state, units)
  local room = state.burst - state.current - units
  if room >= 0 then return ms_of(state, state.left - before_end(room, state.previous, state.window)) end
  local after = before_end(state.burst - units, state.current, state.window)
  return ms_of(state, state.left + state.window - after)
end

-- The units of this window and of the previous one with so many taken. What is returned comes from this one first.
local function with_taken(state, units)
  local current = state.current + units
  return math.max(0, current), math.max(0, state.previous + math.min(0, current))
end

-- The room, in units times steps, with so many units taken.
local function room_with(state, units)
  local current, previous = with_taken(state, units)
  return (state.burst - current) * state.window - previous * state.left
end

local function refuse(state, cost, is_enforced)
  local units = state.taken + cost
  if units > state.burst and is_enforced then return 'cost_above_limit' end
  if room_with(state, units) < 0 and is_enforced then return 'rate_exceeded', retry_ms(state, units) end
end

local function take(state)
  share.take(state, state.current + state.previous)
  local current, previous = with_taken(state, state.taken)
  state.current, state.previous = math.min(current, MAX_USED), previous
end

local function keep(state, key)
  local remembered = struct.pack('<ddd', state.started, state.current, state.previous)
  share.keep(KEYS[key], state, remembered, ms_of(state, state.left + state.window))
end

local function tell(state, taken)
  local reset_ms = 0
  local current, previous = with_taken(state, taken)
  if current > 0 then reset_ms = ms_of(state, state.left + state.window)
  elseif previous > 0 then reset_ms = ms_of(state, state.left) end
  return state.burst, math.max(0, math.floor(room_with(state, taken) / state.window)), reset_ms
end

return {keys = 1, arguments = 3, look = look, refuse = refuse, take = take, keep = keep, tell = tell}
