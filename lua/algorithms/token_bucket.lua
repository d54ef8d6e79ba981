-- A token bucket: a rate, and as many units at once as its burst.
--
-- Keeps  `parts`, what is in the bucket in thousand-millionths of a unit, and `since`, up to when it was filled. A
--        refill is a whole number of parts each millisecond, and what the microseconds beyond bring is reckoned anew
--        each time, so nothing is ever rounded away. Forgotten when it is full.
-- KEYS  1 the packed state (parts/share)
-- ARGV  1 rate_micro   2 burst: the safe share
-- Gives the algorithm. In any time t it admits at most burst + rate × t. A bucket keeps its units when its limit
--       changes, up to the new burst. A cost below zero gives units back, up to the burst. An adjustment leaves it
--       owing, but no more parts than are counted exactly: what is beyond is forgotten.

local mono = ...
local share = require('parts/share')
local MAX_UNITS, PARTS, LONG_MS = 9007199254740991, 1000000000, 2147483648

-- How long the bucket takes to gain so many parts; without a rate it gains none.
local function ms_to_gain(parts, rate_micro, never_ms)
  return rate_micro > 0 and math.ceil(parts / rate_micro) or never_ms
end

local function look(key, at)
  local state = share.look(KEYS[key], 'parts', tonumber(ARGV[at]), tonumber(ARGV[at + 1]), mono)
  local full, rate_micro = state.burst * PARTS, state.rate_micro
  local parts, since = full, mono
  if state.remembered ~= '' then parts, since = struct.unpack('<dd', state.remembered) end
  state.parts, state.extra, state.since = share.filled(parts, since, mono, rate_micro, full)
  state.full = full
  return state
end

local function parts_left(state, taken)
  return math.min(math.max(state.parts - taken * PARTS, -MAX_UNITS), state.full - state.extra)
end

local function refuse(state, cost, is_enforced)
  local needed = (state.taken + cost) * PARTS
  if state.taken + cost > state.burst and is_enforced then return 'cost_above_limit' end
  local there = state.parts + state.extra
  if needed > there and is_enforced then
    local parts = needed - there
    return 'rate_exceeded', share.gain_ms(state, ms_to_gain(parts, state.rate_micro, 1000), parts)
  end
end

local function take(state)
  state.parts = parts_left(state, state.taken)
  share.take(state)
end

local function keep(state, key)
  local missing = state.full - state.parts
  local ttl_ms = share.gain_ms(state, ms_to_gain(missing, state.rate_micro, LONG_MS), missing)
  share.keep(KEYS[key], state, struct.pack('<dd', state.parts, state.since), ttl_ms)
end

local function tell(state, taken)
  local parts = parts_left(state, taken)
  local there = parts + state.extra
  local reset_ms = ms_to_gain(state.full - there, state.rate_micro, 1000)
  return state.burst, math.max(0, math.floor(there / PARTS)), reset_ms, there, state.rate_micro
end

return {keys = 1, arguments = 2, look = look, refuse = refuse, take = take, keep = keep, tell = tell}
