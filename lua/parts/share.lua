-- The packed state of a rate: one short string, read and written in half the time that a hash takes.
--
-- KEYS     none
-- ARGV     none
-- Returns  {LAYOUTS, positive, look, take, keep, read, level, install, filled, ahead, gain_ms, forget}: all but the
--          first are functions of a key's name, a state or numbers
--
-- The string is the number of a layout (a byte, see LAYOUTS), then, where the region was given a share, doubles: the
-- share's `number`, `rate_micro`, `ends` on the store's clock, `after_micro` (-1: base share), `kept` and `spent`;
-- then the state of the algorithm. A share is in force until it ends, then `after_micro` until `kept`, and then it is
-- over. The units in a bucket came at the rate that was in force then, and do not change when the rate does. An
-- algorithm that finds another layout than its own begins anew. The key expires when its state says no more than an
-- absent key.

local clock = require('parts/clock')

local LAYOUTS = {none = 0, level = 6, arrival = 7, fixed = 8, sliding = 9, log = 10, calendar = 11}
local SHARED, SHARE, SHARE_BYTES, SAFE, FINEST = 128, '<dddddd', 48, -1, 20
local MAX_UNITS, LONG_MS = 9007199254740991, 2147483648

-- A share may be zero, and no time is long enough then.
local function positive(rate_micro) return rate_micro > 0 and rate_micro or 1 end

-- What some microseconds bring, rounded down to a whole part of a nano-unit and what is cut off. A slow rate is counted
-- in binary fractions of a nano-unit, the smallest that the level of a bucket has beside its units.
local function of_microseconds(us, rate_micro, full)
  local beyond, parts = us * rate_micro, 1
  if rate_micro % 1 ~= 0 then
    local _, bits = math.frexp(math.floor(2 ^ 53 / full))
    parts = 2 ^ math.min(FINEST, bits - 1)
    beyond = beyond * parts
  end
  local cut_off = math.fmod(beyond, 1000)
  return (beyond - cut_off) / 1000 / parts, cut_off > 0 and 1 / parts or 0
end

-- Refill a bucket up to a moment: the level after whole milliseconds, what the microseconds after them bring, and when
-- those begin.
local function filled(level, since, at, rate_micro, full)
  if level >= full then return full, 0, at end
  local elapsed_us = at > since and at - since or 0
  local extra, gained = of_microseconds(elapsed_us % 1000, rate_micro, full), math.floor(elapsed_us / 1000) * rate_micro
  if gained + extra >= full - level then return full, 0, at end
  return level + gained, extra, since + elapsed_us - elapsed_us % 1000
end

-- How far ahead of a moment an arrival time is, in nano-units rounded up; 0 if it has passed.
local function ahead(due, rest, at, rate_micro, full)
  if due + 1000 <= at then return 0 end
  local ahead_us = (due - at) % 1000
  local extra, cut_off = of_microseconds(ahead_us, rate_micro, full)
  local arrived = (due - at - ahead_us) / 1000 * rate_micro + extra + cut_off + rest
  return math.min(math.max(0, arrived), MAX_UNITS)
end

-- The state of an algorithm, carried to the moment at which another rate begins.
local carry = {
  [LAYOUTS.level] = function(remembered, at, old_micro, _, burst)
    local level_then, since = struct.unpack('<dd', remembered)
    local whole, extra = filled(level_then, since, at, old_micro, burst * 1000000000)
    return struct.pack('<dd', whole + extra, at)
  end,
  [LAYOUTS.arrival] = function(remembered, at, old_micro, new_micro, burst)
    local due, rest = struct.unpack('<dd', remembered)
    old_micro, new_micro = positive(old_micro), positive(new_micro)
    local nano_units = ahead(due, math.min(rest, old_micro - 1), at, old_micro, burst * 1000000000)
    if nano_units == 0 then return '' end
    rest = math.fmod(nano_units, new_micro)
    return struct.pack('<dd', math.min(at + (nano_units - rest) / new_micro * 1000, MAX_UNITS), rest)
  end,
}

local function change(state, at, old_micro, new_micro)
  local carried = carry[state.layout]
  if carried and state.remembered ~= '' and old_micro ~= new_micro then
    state.remembered = carried(state.remembered, at, old_micro, new_micro, state.burst)
  end
end

-- Return the rate in force, after the steps of the share that are over by now.
local function pass(state, base_share_micro)
  local share = state.share
  while share and clock.mono >= share.ends do
    local at, old_micro, after_micro = share.ends, share.rate_micro, share.after_micro
    if after_micro == SAFE then
      share, state.share, after_micro = nil, nil, base_share_micro
    else
      share.rate_micro, share.ends, share.after_micro = after_micro, share.kept, SAFE
    end
    change(state, at, old_micro, after_micro)
  end
  return share and share.rate_micro or base_share_micro
end

local function read(key, base_share_micro, burst)
  local packed = redis.call('GET', key)
  -- The last four make room for what the algorithm adds, for a table that grows is made anew.
  local state = {layout = LAYOUTS.none, burst = burst, remembered = '', rate_micro = base_share_micro,
    base_share_micro = base_share_micro, taken = 0, share = nil, full = nil, level = nil, since = nil}
  if not packed then return state end
  state.layout = string.byte(packed)
  if state.layout < SHARED then
    state.remembered = string.sub(packed, 2)
    return state
  end
  state.layout = state.layout - SHARED
  local number, rate_micro, ends, after_micro, kept, spent = struct.unpack(SHARE, packed, 2)
  state.share = {number = number, rate_micro = rate_micro, ends = ends, after_micro = after_micro, kept = kept,
    spent = spent}
  state.remembered = string.sub(packed, SHARE_BYTES + 2)
  state.rate_micro = pass(state, base_share_micro)
  return state
end

local function write(key, state, ttl_ms)
  local share, head = state.share, string.char(state.layout)
  if share then
    head = string.char(state.layout + SHARED) .. struct.pack(SHARE, share.number, share.rate_micro, share.ends,
      share.after_micro, share.kept, share.spent)
    ttl_ms = math.max(ttl_ms, math.ceil((share.kept - clock.mono) / 1000))
  end
  redis.call('SET', key, head .. state.remembered, 'PX', ttl_ms < 1 and 1 or ttl_ms)
end

local levels = {
  [LAYOUTS.level] = function(remembered, state, full)
    local level_then, since = struct.unpack('<dd', remembered)
    local whole, extra = filled(level_then, since, clock.mono, state.rate_micro, full)
    return whole + extra
  end,
  [LAYOUTS.arrival] = function(remembered, state, full)
    local due, rest = struct.unpack('<dd', remembered)
    local rate_micro = positive(state.rate_micro)
    return full - ahead(due, math.min(rest, rate_micro - 1), clock.mono, rate_micro, full)
  end,
}

-- The level of a bucket now, in nano-units.
local function level(state)
  local full, of = state.burst * 1000000000, levels[state.layout]
  return of and state.remembered ~= '' and of(state.remembered, state, full) or full
end

-- Read a state: the share as long as it lasts, else the base share of the arguments, and the algorithm's state.
local function look(key, layout, base_share_micro, burst)
  local state = read(key, base_share_micro, burst)
  if state.layout ~= layout then state.layout, state.remembered = layout, '' end
  return state
end

-- The latest time until so many nano-units have come, if they take `ms` at the rate in force: that may be 0, but once
-- the share is over the rate is the base share.
local function gain_ms(state, ms, nano_units)
  if not state.share then return ms end
  local over_ms = math.ceil((state.share.kept - clock.mono) / 1000)
  return math.min(ms, LONG_MS, over_ms + math.ceil(nano_units / positive(state.base_share_micro)))
end

-- Bound what is returned by the units that are missing, and count what is taken as spent of the share.
local function take(state, missing)
  if state.taken < 0 then state.taken = math.max(state.taken, -math.ceil(missing)) end
  if state.share then state.share.spent = state.share.spent + state.taken end
end

-- Write a state. A call for another policy of the same request writes the same.
local function keep(key, state, remembered, state_ms)
  state.remembered = remembered
  write(key, state, state_ms + 1)
end

-- Install a share, in force from now on.
local function install(key, state, share)
  if share.ends <= clock.mono then
    share.rate_micro, share.ends, share.after_micro = share.after_micro, share.kept, SAFE
  end
  change(state, clock.mono, state.rate_micro, share.rate_micro)
  share.spent = state.share and state.share.spent or 0
  state.share, state.rate_micro = share, share.rate_micro
  write(key, state, redis.call('PTTL', key))
end

-- Forget what was counted, and keep the share.
local function forget(key)
  local packed = redis.call('GET', key)
  if not packed then return end
  if string.byte(packed) < SHARED then redis.call('DEL', key)
  else redis.call('SET', key, string.sub(packed, 1, SHARE_BYTES + 1), 'KEEPTTL') end
end

return {LAYOUTS = LAYOUTS, positive = positive, look = look, take = take, keep = keep, read = read, level = level,
  install = install, filled = filled, ahead = ahead, gain_ms = gain_ms, forget = forget}
