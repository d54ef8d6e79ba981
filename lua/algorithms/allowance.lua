-- A leased allowance: what the region may spend of a period's units, to the unit.
--
-- State    the lease's totals, its usage lines by minute and dimensions, and its holds (parts/holds). The lines are
--          kept apart from the total on purpose: the coordinator compares the two. Nothing of it expires by itself.
-- KEYS[1]  lease
-- KEYS[2]  usage lines
-- KEYS[3]  dirty set of its lane
-- KEYS[4]  holds
-- KEYS[5]  deadlines of the holds
-- ARGV[1]  limit
-- ARGV[2]  quota key
-- ARGV[3]  dimensions (JSON)
-- ARGV[4]  what becomes of a hold that runs out: release | charge
-- Returns  the algorithm. It admits what is available on a lease that has not expired, and moves on to the next period
--          when that begins. `remaining` includes what no region holds. A denied request may be retried when enough of
--          what is held here is free, or when the period ends; the store cannot know what comes earlier.
--
-- Where the lease is not enough and the region is partitioned, it may go on for as much as the lease's `overdraft`
-- says: less the overage that is booked already, and less what it `owes`, which was overdrawn and is not covered yet.
-- Only a request that would be denied looks there.

local clock, holds, period_change = require('parts/clock'), require('parts/holds'), require('parts/period_change')
local partition, report_due = require('parts/partition'), require('parts/report_due')
local MAX_UNITS = 9007199254740991

local function number(text) return tonumber(text or 0) end
local function ms_until(moment) return math.max(0, math.ceil((moment - clock.mono) / 1000)) end

local function place(key, at)
  return {lease = KEYS[key], lines = KEYS[key + 1], dirty = KEYS[key + 2], holds = KEYS[key + 3], due = KEYS[key + 4],
    quota = ARGV[at + 1]}
end

local function read(key)
  return redis.call('HMGET', KEYS[key], 'period', 'granted', 'overage', 'consumed', 'returned', 'held', 'expires',
    'ends', 'unallocated', 'first_minute', 'last_minute', 'last_grant', 'next:starts', 'hold_deadline', 'report_at')
end

local function look(key, at)
  local f = read(key)
  if f[13] and clock.mono >= tonumber(f[13]) then
    period_change.take_over(KEYS[key], ARGV[at + 1], KEYS[key + 2], clock.mono)
    f = read(key)
  end
  if f[14] and clock.mono >= tonumber(f[14]) then
    holds.sweep(place(key, at))
    f = read(key)
  end
  local consumed = number(f[4])
  return {
    lease = KEYS[key], period = f[1], used = consumed + number(f[6]), limit = tonumber(ARGV[at]),
    available = number(f[2]) + number(f[3]) - consumed - number(f[5]) - number(f[6]),
    held = number(f[6]), key = key, at = at, taken = 0,
    expires = number(f[7]), ends = number(f[8]), unallocated = number(f[9]),
    first_minute = number(f[10]), last_minute = number(f[11]), last_grant = number(f[12]), report_at = number(f[15]),
  }
end

-- The units that may be overdrawn. They are read when they are needed, once for a request.
local function overdraft(state)
  if not state.overdraft then
    local f = redis.call('HMGET', state.lease, 'overdraft', 'overage', 'owed')
    local left = number(f[1]) - number(f[2]) - number(f[3])
    local may = left > 0 and clock.mono < state.ends and partition.is_partitioned(clock.mono)
    state.overdraft = may and left or 0
  end
  return state.overdraft
end

-- How many of these units the lease lacks. An expired lease has none.
local function shortfall(state, units)
  if clock.mono >= state.expires then return units end
  return math.max(0, units - math.max(0, state.available))
end

-- The units of the request that are overdrawn; 0 unless `overdraft` was called.
local function overdrawn_by(state) return state.overdraft and shortfall(state, state.taken) or 0 end

local function book_overdraft(state, units)
  local text = string.format('%.0f', units)
  redis.call('HINCRBY', state.lease, 'overdrawn', text)
  redis.call('HINCRBY', state.lease, 'owed', text)
  redis.call('HINCRBY', KEYS[1], 'overdrawn', text)
end

-- Time until so many held units are free again, at most until the period's end.
local function ms_to_free(state, units)
  local free_at = units <= state.held and holds.free_at(place(state.key, state.at), state.period, units)
  return ms_until(free_at and math.min(free_at, state.ends) or state.ends)
end

local function refuse(state, cost, is_enforced)
  local reason
  if cost > state.limit and is_enforced or state.used + state.taken + cost > MAX_UNITS then
    reason = 'cost_above_limit'
  elseif not state.period then reason = 'no_lease'
  elseif clock.mono >= state.expires and is_enforced then reason = 'lease_expired'
  elseif cost > state.available - state.taken and is_enforced then reason = 'lease_spent'
  end
  local is_short = reason == 'lease_expired' or reason == 'lease_spent'
  if is_short and shortfall(state, state.taken + cost) <= overdraft(state) then reason = nil end
  if reason == 'lease_spent' then return reason, ms_to_free(state, state.taken + cost - state.available) end
  return reason, reason and ms_until(state.ends)
end

local function take(state)
  local units = overdrawn_by(state)
  if units > 0 then state.overdrawn, state.overdraft = (state.overdrawn or 0) + units, state.overdraft - units end
  state.available, state.used = state.available - state.taken, state.used + state.taken
end

local function keep(state, key, at, units)
  if state.overdrawn then book_overdraft(state, state.overdrawn) end
  state.overdrawn = nil
  local minute = math.min(math.max(math.floor(clock.now / 60000000), state.first_minute), state.last_minute)
  local line = state.period .. '|' .. minute .. '|' .. ARGV[at + 2]
  local consumed = redis.call('HINCRBY', KEYS[key], 'consumed', units)
  local is_new_line = redis.call('HINCRBY', KEYS[key + 1], line, units) == units
  if consumed >= state.report_at and consumed - units < state.report_at then
    report_due.report_at_once(ARGV[at + 1], KEYS[key + 2])
  elseif is_new_line then
    report_due.note_usage(KEYS[key], ARGV[at + 1], KEYS[key + 2], clock.mono)
  end
end

-- For a hold, instead of `keep`: the units are set aside, and not consumed.
local function hold(state, key, at, cost, name, due)
  local units = overdrawn_by(state)
  if units > 0 then book_overdraft(state, units) end
  state.overdraft = nil -- two parts of one hold on this lease are overdrawn together
  holds.set_aside(place(key, at), {name = name, units = cost, due = due, last_minute = state.last_minute,
    on_expiry = ARGV[at + 3], period = state.period, dimensions = ARGV[at + 2]})
end

local function find(key, at, name) return holds.find(place(key, at), name) end
local function finish(part, state, units) return holds.finish(part, state, units) end
local function extend(part, due) return holds.extend(part, due) end

local function tell(state, taken)
  local available = state.available - taken
  -- Under a soft cap, part of what is available is beyond the limit: then `unallocated` is below zero.
  local remaining = math.max(0, math.max(0, available) + state.unallocated)
  return state.limit, remaining, ms_until(state.ends), available, state.last_grant
end

return {keys = 5, arguments = 4, look = look, refuse = refuse, take = take, keep = keep, tell = tell, hold = hold,
  find = find, finish = finish, extend = extend}
