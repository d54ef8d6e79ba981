-- What services have set aside of a lease, for work whose cost they do not know yet: a part of a hold, each by itself.
--
-- KEYS  none: a place is given, a table with the names of a `lease`, its usage `lines`, its lane's `dirty` set, its
--       `holds` and what is `due` of them, and with its `quota`
-- ARGV  none
-- Gives {set_aside, find, finish, extend, sweep, free_at}, as a function of the store's clock and TIME
--
-- A part is `open`, until its hold is `committed` or `released`, or it runs out: then it has `lapsed`, or it is
-- `charged`, as its policy says. An open part's units are in `held` of its lease, and in no other total; `holds` counts
-- the parts that may yet be committed to. What is booked of a part goes to the period that it was set aside in, though
-- that may be over. What has ended is remembered for a while, to answer a repetition, or a commit that comes late.
--
-- Each part is due once: when it runs out, or is forgotten. Whichever script touches the lease sees to what is due, but
-- never to more than MOST at once; `due` of the lease says when there will be something.

local RAN_OUT_US, ENDED_US = 24 * 3600 * 1000000, 3600 * 1000000 -- how long it is remembered
local MOST = 64
local MAX_UNITS = 9007199254740991
local PENDING = {open = true, lapsed = true, charged = true} -- what may yet be committed to
local PART = '^(%a+) (%d+) (%d+) (%d+) (%d+) (%a+) (%S+) (.*)$'
local over = require('parts/ended_period')

local function number(text) return tonumber(text or 0) end
local function whole(units) return string.format('%.0f', units) end

local function grow(lease, field, by)
  if by ~= 0 then redis.call('HINCRBY', lease, field, whole(by)) end
end

local function note_due(lease, due)
  local first = redis.call('HGET', lease, 'due')
  if not first or due < tonumber(first) then redis.call('HSET', lease, 'due', whole(due)) end
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
  note_due(part.place.lease, part.due)
end

local function forget(part)
  redis.call('HDEL', part.place.holds, part.name)
  redis.call('ZREM', part.place.due, part.name)
  part.state = 'forgotten'
end

-- What its period has consumed and holds; nothing where the lease is gone, and with it all that was set aside of it.
local function used(part)
  local f = redis.call('HMGET', part.place.lease, 'period', 'consumed', 'held')
  if f[1] == part.period then return number(f[2]) + number(f[3]) end
  local was = over.read(part.place.lease, part.period)
  return was and was.consumed + was.held
end

local function book_over(part, held, consumed, holds)
  local was = over.read(part.place.lease, part.period)
  was.held, was.consumed, was.holds = was.held + held, was.consumed + consumed, was.holds + holds
  was.returned = math.max(was.returned, was.granted + was.overage - was.consumed - was.held)
  was.told = 0
  over.write(part.place.lease, part.period, was)
  redis.call('SADD', part.place.dirty, part.place.quota)
end

return function(mono, now)
  local left = MOST

  local function note_line(part, units)
    local minute = math.min(math.floor(now / 60000000), part.last_minute)
    local line = part.period .. '|' .. whole(minute) .. '|' .. part.dimensions
    redis.call('HINCRBY', part.place.lines, line, whole(units))
    redis.call('SADD', part.place.dirty, part.place.quota)
  end

  -- Every change of a total by a hold: so many units more are held, consumed; so many parts more may be committed to.
  local function book(part, held, consumed, holds)
    local lease = part.place.lease
    if redis.call('HGET', lease, 'period') == part.period then
      grow(lease, 'held', held)
      grow(lease, 'consumed', consumed)
      grow(lease, 'holds', holds)
    else
      book_over(part, held, consumed, holds)
    end
    if consumed > 0 then note_line(part, consumed) end
  end

  local function run_out(part)
    local charged = part.on_expiry == 'charge'
    book(part, -part.units, charged and part.units or 0, 0)
    part.state, part.due = charged and 'charged' or 'lapsed', mono + RAN_OUT_US
    write(part)
  end

  local function fall_due(part)
    if part.state == 'open' then return run_out(part) end
    if PENDING[part.state] then book(part, 0, 0, -1) end
    forget(part)
  end

  local function sweep_due(place)
    local names = redis.call('ZRANGEBYSCORE', place.due, '-inf', whole(mono), 'LIMIT', 0, left)
    left = left - #names
    for _, name in ipairs(names) do
      local part = read(place, name)
      if used(part) then fall_due(part) else forget(part) end
    end
    local first = redis.call('ZRANGE', place.due, 0, 0, 'WITHSCORES')[2]
    if first then redis.call('HSET', place.lease, 'due', whole(first)) else redis.call('HDEL', place.lease, 'due') end
  end

  -- Nothing, unless something is due.
  local function sweep(place)
    local due = redis.call('HGET', place.lease, 'due')
    if due and tonumber(due) <= mono then sweep_due(place) end
  end

  local function set_aside(place, part)
    part.place, part.state, part.committed = place, 'open', 0
    book(part, part.units, 0, 1)
    write(part)
  end

  -- The part as it is now; nothing where it is not known, or not any more. `most` is what may still be committed.
  local function find(place, name)
    sweep(place)
    local part = read(place, name)
    local sum = part and used(part)
    if not part or PENDING[part.state] and not sum then return nil end
    if part.due <= mono then fall_due(part) end
    part.most = MAX_UNITS - (sum or 0)
    return part.state ~= 'forgotten' and part or nil
  end

  -- So many units were used: of an open part the rest is free again, of a charged one only what is beyond is booked.
  local function finish(part, state, units)
    local held = part.state == 'open' and part.units or 0
    local paid = part.state == 'charged' and part.units or 0
    book(part, -held, math.max(0, units - paid), -1)
    part.state, part.committed, part.due = state, units, mono + ENDED_US
    write(part)
  end

  local function extend(part, due)
    part.due = math.max(part.due, due)
    write(part)
  end

  -- When so many units that are set aside are free again if each hold runs out; nothing if that never happens, for a
  -- hold may be charged then. Of more than MOST parts it is the last that was looked at: no earlier than that.
  local function free_at(place, period, units)
    local due = redis.call('ZRANGE', place.due, 0, MOST - 1, 'WITHSCORES')
    for i = 1, #due, 2 do
      local part = read(place, due[i])
      local comes_back = part and part.state == 'open' and part.period == period and part.on_expiry ~= 'charge'
      if comes_back then units = units - part.units end
      if units <= 0 then return tonumber(due[i + 1]) end
    end
    return #due == 2 * MOST and tonumber(due[#due]) or nil
  end

  return {set_aside = set_aside, find = find, finish = finish, extend = extend, sweep = sweep, free_at = free_at}
end
