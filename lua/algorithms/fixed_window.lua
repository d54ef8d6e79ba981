-- A fixed window: so many units from the first request on, and again when the window is over.
--
-- State    `started`, the moment of the window's first unit, and `used`. It expires when the window is over.
-- KEYS[1]  the packed state (parts/share)
-- ARGV[1]  rate_micro
-- ARGV[2]  units in a window: the base share
-- ARGV[3]  the window, ms
-- Returns  the algorithm. No window admits more than its limit; around the boundary of two windows, twice as much may
--          pass within a moment. A changed limit is in force at once, with what the window has used.

local clock, number, share = require('parts/clock'), require('parts/number'), require('parts/share')
local MAX_UNITS = 9007199254740991

local function look(key, at)
  local state = share.look(KEYS[key], share.LAYOUTS.fixed, number(ARGV[at]), number(ARGV[at + 1]))
  local window = ARGV[at + 2] * 1000
  local mono, started, used = clock.mono, clock.mono, 0
  if state.remembered ~= '' then started, used = struct.unpack('<dd', state.remembered) end
  if used == 0 or mono - started >= window then started, used = mono, 0 end
  state.started, state.used = started, used
  state.left_ms = math.ceil((started + window - mono) / 1000)
  return state
end

local function refuse(state, cost, is_enforced)
  local units = state.taken + cost
  if units > state.burst and is_enforced or state.used + units > MAX_UNITS then return 'cost_above_limit' end
  if state.used + units > state.burst and is_enforced then return 'rate_exceeded', state.left_ms end
end

local function take(state)
  share.take(state, state.used)
  state.used = state.used + state.taken
end

local function keep(state, key)
  share.keep(KEYS[key], state, struct.pack('<dd', state.started, state.used), state.left_ms)
end

local function tell(state, taken)
  local used = math.max(0, state.used + taken)
  return state.burst, math.max(0, state.burst - used), used > 0 and state.left_ms or 0
end

return {keys = 1, arguments = 3, look = look, refuse = refuse, take = take, keep = keep, tell = tell}
