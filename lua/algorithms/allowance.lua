-- A leased allowance: what the region may spend of a period's units, to the unit.
--
-- Keeps  the lease's totals, and usage lines by minute and dimensions, apart from the total on purpose: the coordinator
--        compares the two counts. None of it is ever forgotten by itself.
-- KEYS  1 the lease   2 its usage lines   3 its lane's dirty set
-- ARGV  1 limit   2 quota key   3 dimensions (JSON)
-- Gives the algorithm. It admits what is available on a lease that has not expired, and goes over to the next period's
--       when that begins. `remaining` counts what no region holds as well; a denial may be asked again when the period
--       ends, for what comes before that nobody here knows.

local mono, now = ...
local MAX_UNITS = 9007199254740991

local function number(text) return tonumber(text or 0) end
local function ms_until(moment) return math.max(0, math.ceil((moment - mono) / 1000)) end

local function read(key)
  return redis.call('HMGET', KEYS[key], 'period', 'granted', 'overage', 'consumed', 'returned', 'held', 'expires',
    'ends', 'unallocated', 'first_minute', 'last_minute', 'last_grant', 'next:starts')
end

local function look(key, at)
  local f = read(key)
  if f[13] and mono >= tonumber(f[13]) then
    require('parts/take_over').take_over(KEYS[key], ARGV[at + 1], KEYS[key + 2], mono)
    f = read(key)
  end
  local consumed = number(f[4])
  return {
    period = f[1], consumed = consumed, limit = tonumber(ARGV[at]),
    available = number(f[2]) + number(f[3]) - consumed - number(f[5]) - number(f[6]),
    expires = number(f[7]), ends = number(f[8]), unallocated = number(f[9]),
    first_minute = number(f[10]), last_minute = number(f[11]), last_grant = number(f[12]),
  }
end

local function refuse(state, cost, is_enforced)
  local reason
  if cost > state.limit and is_enforced or state.consumed + state.taken + cost > MAX_UNITS then
    reason = 'cost_above_limit'
  elseif not state.period then reason = 'no_lease'
  elseif mono >= state.expires and is_enforced then reason = 'lease_expired'
  elseif cost > state.available - state.taken and is_enforced then reason = 'lease_spent'
  end
  return reason, reason and ms_until(state.ends)
end

local function keep(state, key, at, cost)
  local minute = math.min(math.max(math.floor(now / 60000000), state.first_minute), state.last_minute)
  local line = state.period .. '|' .. string.format('%.0f', minute) .. '|' .. ARGV[at + 2]
  local units = string.format('%.0f', cost)
  redis.call('HINCRBY', KEYS[key], 'consumed', units)
  if redis.call('HINCRBY', KEYS[key + 1], line, units) == cost then redis.call('SADD', KEYS[key + 2], ARGV[at + 1]) end
end

local function tell(state, taken)
  local available = state.available - taken
  return state.limit, math.max(0, available) + state.unallocated, ms_until(state.ends), available, state.last_grant
end

return {keys = 3, arguments = 3, look = look, refuse = refuse, keep = keep, tell = tell}
