-- A token bucket: a rate, and as many units at once as its burst.
--
-- State    `level`, the nano-units in the bucket, and `since`, up to when it was filled. A refill is a whole number of
--          nano-units each millisecond, of a slow rate with binary fractions, and what further microseconds bring is
--          computed anew each time, so nothing is ever rounded away. It expires when the bucket is full.
-- KEYS[1]  the packed state (parts/share)
-- ARGV[1]  rate_micro of the base share
-- ARGV[2]  burst of the base share
-- Returns  the algorithm. In any time t it admits at most burst + rate × t. A bucket keeps its units when its limit
--          changes, up to the new burst. A negative cost returns units, up to the burst. An adjustment may drive the
--          level below zero, but not below what is counted exactly: what is beyond is dropped.

local clock, number, share = require('parts/clock'), require('parts/number'), require('parts/share')
local LAYOUT = share.LAYOUTS.level
local MAX_UNITS, NANO_UNITS, LONG_MS = 9007199254740991, 1000000000, 2147483648

-- Time until the bucket has gained so many nano-units; without a rate it gains none.
local function ms_to_gain(nano_units, rate_micro, never_ms)
  return rate_micro > 0 and math.ceil(nano_units / rate_micro) or never_ms
end

local function look(key, at)
  local state = share.look(KEYS[key], LAYOUT, number(ARGV[at]), number(ARGV[at + 1]))
  local full = state.burst * NANO_UNITS
  state.full = full
  if state.remembered == '' then
    state.level, state.extra, state.since = full, 0, clock.mono
  else
    local level, since = struct.unpack('<dd', state.remembered)
    state.level, state.extra, state.since = share.filled(level, since, clock.mono, state.rate_micro, full)
  end
  return state
end

local function level_with(state, taken)
  local level, most = state.level - taken * NANO_UNITS, state.full - state.extra
  if level > most then return most end
  return level < -MAX_UNITS and -MAX_UNITS or level
end

local function refuse(state, cost, is_enforced)
  local needed = (state.taken + cost) * NANO_UNITS
  if state.taken + cost > state.burst and is_enforced then return 'cost_above_limit' end
  local available = state.level + state.extra
  if needed > available and is_enforced then
    local missing = needed - available
    return 'rate_exceeded', share.gain_ms(state, ms_to_gain(missing, state.rate_micro, 1000), missing)
  end
end

local function take(state)
  share.take(state, (state.full - state.extra - state.level) / NANO_UNITS)
  state.level = level_with(state, state.taken)
end

local function keep(state, key)
  local missing = state.full - state.level
  local ttl_ms = share.gain_ms(state, ms_to_gain(missing, state.rate_micro, LONG_MS), missing)
  share.keep(KEYS[key], state, struct.pack('<dd', state.level, state.since), ttl_ms)
end

local function tell(state, taken)
  local level = level_with(state, taken)
  local available = level + state.extra
  local reset_ms = ms_to_gain(state.full - available, state.rate_micro, 1000)
  local remaining = available > 0 and math.floor(available / NANO_UNITS) or 0
  return state.burst, remaining, reset_ms, available, state.rate_micro
end

return {keys = 1, arguments = 2, look = look, refuse = refuse, take = take, keep = keep, tell = tell}
