-- The parts of holds that are set aside of a lease, for work whose cost is not known yet.
--
-- KEYS     none: a place is an argument, a table with the names of a `lease`, its usage `lines`, the `dirty` set of its
--          lane, its `holds` and their deadlines (`due`), and with its `quota`
-- ARGV     none
-- Returns  {set_aside, find, finish, extend, sweep, free_at}
--
-- A part is `open` until its hold is `committed` or `released`, or until it runs out: then it has `lapsed`, or is
-- `charged`, as its policy says. The units of an open part are in `held` of its lease, and in no other total; `holds`
-- counts the parts that may still be committed. A part is booked in the period that it was set aside in, though that
-- may have ended. What has ended is remembered for a while, to answer a repetition, or a commit that comes late.
--
-- Each part has one deadline: when it runs out, or is forgotten. Any script that touches the lease handles what is due,
-- at most MAX_SWEPT parts at once; the lease's `hold_deadline` is the next moment at which something is due.

local RAN_OUT_US, ENDED_US = 24 * 3600 * 1000000, 3600 * 1000000 -- how long a part is remembered
local MAX_SWEPT = 64
local MAX_UNITS = 9007199254740991
local PENDING = {open = true, lapsed = true, charged = true} -- states of parts that may still be committed
local PART = '^(%a+) (%d+) (%d+) (%d+) (%d+) (%a+) (%S+) (.*)$'
local clock, ended_periods = require('parts/clock'), require('parts/ended_period')
local report_due = require('parts/report_due')

local function number(text) return tonumber(text or 0) end
local function whole(units) return string.format('%.0f', units) end

local function grow(lease, field, by)
  if by ~= 0 then redis.call('HINCRBY', lease, field, whole(by)) end
end

local function note_deadline(lease, due)
  local first = redis.call('HGET', lease, 'hold_deadline')
  if not first or due < tonumber(first) then redis.call('HSET', lease, 'hold_deadline', whole(due)) end
end

local function read(place, name)
  local text = redis.call('HGET', place.holds, name)
  if not text then return nil end
  local state, units, committed, due, last_minute, on_expiry, period, dimensions = string.match(text, PART)
  return {place = place, name = name, state = state, units = tonumber(units), committed = tonumber(committed),
    due = tonumber(due), last_minute = tonumber(last_minute), on_expiry = on_expiry, period = period,
    dimensions = dimensions}
end

local function write(part)
  redis.call('HSET', part.place.holds, part.name, table.concat({part.state, whole(part.units), whole(part.committed),
    whole(part.due), whole(part.last_minute), part.on_expiry, part.period, part.dimensions}, ' '))
  redis.call('ZADD', part.place.due, whole(part.due), part.name)
  note_deadline(part.place.lease, part.due)
end

local function forget(part)
  redis.call('HDEL', part.place.holds, part.name)
  redis.call('ZREM', part.place.due, part.name)
  part.state = 'forgotten'
end

-- The units that a part's period has consumed and holds; nil where the lease is gone, and with it all of its holds.
local function used(part)
  local f = redis.call('HMGET', part.place.lease, 'period', 'consumed', 'held')
  if f[1] == part.period then return number(f[2]) + number(f[3]) end
  local ended = ended_periods.read(part.place.lease, part.period)
  return ended and ended.consumed + ended.held
end

local function book_ended(part, held, consumed, holds)
  local ended = ended_periods.read(part.place.lease, part.period)
  ended.held, ended.consumed, ended.holds = ended.held + held, ended.consumed + consumed, ended.holds + holds
  ended.returned = math.max(ended.returned, ended.granted + ended.overage - ended.consumed - ended.held)
  ended.reported_seq = 0
  ended_periods.write(part.place.lease, part.period, ended)
  report_due.report_at_once(part.place.quota, part.place.dirty)
end

local swept_in, left = 0, 0 -- the last call that swept, and how many parts it may still sweep

local function note_line(part, units)
  local minute = math.min(math.floor(clock.now / 60000000), part.last_minute)
  local line = part.period .. '|' .. whole(minute) .. '|' .. part.dimensions
  redis.call('HINCRBY', part.place.lines, line, whole(units))
  local f = redis.call('HMGET', part.place.lease, 'consumed', 'report_at')
  if number(f[1]) < number(f[2]) or number(f[2]) == 0 then
    report_due.note_usage(part.place.lease, part.place.quota, part.place.dirty, clock.mono)
  else
    report_due.report_at_once(part.place.quota, part.place.dirty)
  end
end

-- Add to the totals of a part's period: units held, units consumed, parts that may still be committed.
local function book(part, held, consumed, holds)
  local lease = part.place.lease
  if redis.call('HGET', lease, 'period') == part.period then
    grow(lease, 'held', held)
    grow(lease, 'consumed', consumed)
    grow(lease, 'holds', holds)
  else
    book_ended(part, held, consumed, holds)
  end
  if consumed > 0 then note_line(part, consumed) end
end

local function run_out(part)
  local charged = part.on_expiry == 'charge'
  book(part, -part.units, charged and part.units or 0, 0)
  part.state, part.due = charged and 'charged' or 'lapsed', clock.mono + RAN_OUT_US
  write(part)
end

local function on_deadline(part)
  if part.state == 'open' then return run_out(part) end
  if PENDING[part.state] then book(part, 0, 0, -1) end
  forget(part)
end

local function sweep_due(place)
  if swept_in ~= clock.calls then swept_in, left = clock.calls, MAX_SWEPT end
  local names = redis.call('ZRANGEBYSCORE', place.due, '-inf', whole(clock.mono), 'LIMIT', 0, left)
  left = left - #names
  for _, name in ipairs(names) do
    local part = read(place, name)
    if used(part) then on_deadline(part) else forget(part) end
  end
  local first = redis.call('ZRANGE', place.due, 0, 0, 'WITHSCORES')[2]
  if first then redis.call('HSET', place.lease, 'hold_deadline', whole(first))
  else redis.call('HDEL', place.lease, 'hold_deadline') end
end

-- Handle the parts that are due.
local function sweep(place)
  local due = redis.call('HGET', place.lease, 'hold_deadline')
  if due and tonumber(due) <= clock.mono then sweep_due(place) end
end

local function set_aside(place, part)
  part.place, part.state, part.committed = place, 'open', 0
  book(part, part.units, 0, 1)
  write(part)
end

-- Return the part as it is now; nil where it is unknown or forgotten. `most` is what may still be committed.
local function find(place, name)
  sweep(place)
  local part = read(place, name)
  local sum = part and used(part)
  if not part or PENDING[part.state] and not sum then return nil end
  if part.due <= clock.mono then on_deadline(part) end
  part.most = MAX_UNITS - (sum or 0)
  return part.state ~= 'forgotten' and part or nil
end

-- End a part with the units that were used: an open one frees the rest, a charged one books only what exceeds it.
local function finish(part, state, units)
  local held = part.state == 'open' and part.units or 0
  local paid = part.state == 'charged' and part.units or 0
  book(part, -held, math.max(0, units - paid), -1)
  part.state, part.committed, part.due = state, units, clock.mono + ENDED_US
  write(part)
end

local function extend(part, due)
  part.due = math.max(part.due, due)
  write(part)
end

-- When so many units are free again if all holds run out; nil if that never happens, for holds may be charged then.
-- Only MAX_SWEPT parts are looked at: with more, the answer is the last of them, and it will be no earlier.
local function free_at(place, period, units)
  local due = redis.call('ZRANGE', place.due, 0, MAX_SWEPT - 1, 'WITHSCORES')
  for i = 1, #due, 2 do
    local part = read(place, due[i])
    local comes_back = part and part.state == 'open' and part.period == period and part.on_expiry ~= 'charge'
    if comes_back then units = units - part.units end
    if units <= 0 then return tonumber(due[i + 1]) end
  end
  return #due == 2 * MAX_SWEPT and tonumber(due[#due]) or nil
end

return {set_aside = set_aside, find = find, finish = finish, extend = extend, sweep = sweep, free_at = free_at}
