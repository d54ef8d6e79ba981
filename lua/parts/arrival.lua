-- The theoretical arrival time: the state of GCRA and of the leaky bucket, and how they decide by it.
--
-- KEYS[1]  the packed state (parts/share)
-- ARGV[1]  rate_micro of the base share
-- ARGV[2]  burst of the base share
-- Returns  the algorithm (lua/README.md)
--
-- The state is `due`, in microseconds, and `rest`, the nano-units that take less than a millisecond. A millisecond
-- brings `rate_micro` nano-units, of a slow rate with binary fractions, so no arrival is ever rounded. In any time t at
-- most burst + rate × t units are admitted. A key keeps its time when its limit changes, and its level when its share
-- does. A negative cost returns units, up to the burst.

local clock, number, share = require('parts/clock'), require('parts/number'), require('parts/share')
local MAX_UNITS, NANO_UNITS = 9007199254740991, 1000000000

local function look(key, at)
  local state = share.look(KEYS[key], share.LAYOUTS.arrival, number(ARGV[at]), number(ARGV[at + 1]))
  state.rate_micro = share.positive(state.rate_micro)
  local mono, due, rest = clock.mono, clock.mono, 0
  if state.remembered ~= '' then due, rest = struct.unpack('<dd', state.remembered) end
  if rest >= state.rate_micro then rest = math.max(0, state.rate_micro - 1) end
  state.ahead = share.ahead(due, rest, mono, state.rate_micro, state.burst * NANO_UNITS)
  if state.ahead == 0 then due, rest = mono, 0 end
  state.due, state.rest = due, rest
  return state
end

local function refuse(state, cost, is_enforced)
  local units = state.taken + cost
  if units > state.burst and is_enforced then return 'cost_above_limit' end
  local over = state.ahead - (state.burst - units) * NANO_UNITS
  if over > 0 and is_enforced then
    return 'rate_exceeded', share.gain_ms(state, math.ceil(over / state.rate_micro), over)
  end
end

-- How far ahead the arrival time is with so many units taken; `taken` is negative where units are returned.
local function ahead_with(state, taken)
  return math.min(math.max(0, state.ahead + taken * NANO_UNITS), MAX_UNITS)
end

local function reset_ms(state, taken) return math.ceil(ahead_with(state, taken) / state.rate_micro) end

local function take(state)
  share.take(state, state.ahead / NANO_UNITS)
  local nano_units = state.rest + math.min(state.taken * NANO_UNITS, MAX_UNITS) -- beyond it an adjustment is dropped
  local rest = math.fmod(nano_units, state.rate_micro)
  if rest < 0 then rest = rest + state.rate_micro end
  local latest = clock.mono + math.floor(MAX_UNITS / state.rate_micro) * 1000
  state.due = math.min(state.due + (nano_units - rest) / state.rate_micro * 1000, latest, MAX_UNITS)
  state.rest, state.ahead = rest, ahead_with(state, state.taken)
end

local function keep(state, key)
  local ttl_ms = share.gain_ms(state, reset_ms(state, 0), state.ahead)
  share.keep(KEYS[key], state, struct.pack('<dd', state.due, state.rest), ttl_ms)
end

local function tell(state, taken)
  local left = state.burst * NANO_UNITS - ahead_with(state, taken)
  local remaining, delay_ms = math.max(0, math.floor(left / NANO_UNITS)), math.ceil(state.ahead / state.rate_micro)
  return state.burst, remaining, reset_ms(state, taken), left, state.rate_micro, delay_ms
end

return {keys = 1, arguments = 2, look = look, refuse = refuse, take = take, keep = keep, tell = tell}
