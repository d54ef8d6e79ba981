-- Slots of a concurrency: so many units at once. A hold takes them and releases them; a hold that is not ended loses
-- them.
--
-- State    `used`, the units that are taken, and each slot by the name of its hold: state, units, committed units, when
--          it runs out, and how far ahead that may be. A slot that ended or ran out is remembered for ten minutes, so
--          that its action may be repeated; the keys expire with the last one. Of slots that regions share by demand
--          also `share`, which the coordinator gave, and `base_share`, the share by weight.
-- KEYS[1]  slots, a hash
-- KEYS[2]  deadlines of the slots that are taken
-- KEYS[3]  when each slot may be forgotten
-- ARGV[1]  limit: the region's part of it; where regions share the slots, the limit of all
-- ARGV[2]  slot_ttl: how long a slot is held at most unless it is extended, ms
-- ARGV[3]  the region's base share; -1: its part is not shared
-- Returns  the algorithm, which can `hold` and cannot `keep`, for slots must be released. The units that are taken
--          never exceed the limit that was in force when the last of them was taken; lowering a limit takes nothing
--          away. A slot that has run out is free at that microsecond, before any script removes it. A denial says when
--          enough slots will have run out; mostly they are released earlier.
--
-- A share is in force until it ends, then what is left of it until `kept`: so long that everything another region took
-- by what was lent to it has run out. Then the region has its base share again. A store that has lost its data has no
-- share for as long, for others may count on the share that it has forgotten, and its slots may still be in use.
-- Extending a shared slot takes it anew: it is refused while more slots are in use than the region may have by now.

local clock = require('parts/clock')
local MAX_UNITS, REMEMBERED_US, CHUNK = 9007199254740991, 600000000, 64
local SLOT = '^(%a+) (%d+) (%d+) (%d+) (%d+)$'
local SHARE, KEPT_US, SOON_MS = '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$', 40000000, 1000

local function whole(number) return string.format('%.0f', number) end
local function ms_until(moment) return math.max(0, math.ceil((moment - clock.mono) / 1000)) end
local function place(key) return {slots = KEYS[key], deadlines = KEYS[key + 1], retention = KEYS[key + 2]} end

local function read(text)
  local state, units, committed, due, longest_us = string.match(text, SLOT)
  return {state = state, units = tonumber(units), committed = tonumber(committed), due = tonumber(due),
    longest_us = tonumber(longest_us)}
end

-- Slots that are taken, those that run out first before others: {name, deadline, …}, at most `most` of them.
local function taken_slots(at, from, most)
  return redis.call('ZRANGE', at.deadlines, from, from + most - 1, 'WITHSCORES')
end

local function units_of(at, names)
  local units = 0
  for _, text in ipairs(redis.call('HMGET', at.slots, unpack(names))) do
    units = units + tonumber(string.match(text, '^%a+ (%d+)'))
  end
  return units
end

-- Free the slots that have run out: never more than the largest limit so far. If all have, there is nothing to add up.
local function run_out(at)
  local last = redis.call('ZRANGE', at.deadlines, -1, -1, 'WITHSCORES')[2]
  if last and tonumber(last) <= clock.mono then
    redis.call('HSET', at.slots, 'used', 0)
    redis.call('DEL', at.deadlines)
    return
  end
  while true do
    local names = redis.call('ZRANGEBYSCORE', at.deadlines, '-inf', whole(clock.mono), 'LIMIT', 0, CHUNK)
    if #names == 0 then return end
    redis.call('HINCRBY', at.slots, 'used', whole(-units_of(at, names)))
    redis.call('ZREMRANGEBYRANK', at.deadlines, 0, #names - 1)
  end
end

local function forget(at)
  local names = redis.call('ZRANGEBYSCORE', at.retention, '-inf', whole(clock.mono), 'LIMIT', 0, CHUNK)
  if #names == 0 then return end
  redis.call('HDEL', at.slots, unpack(names))
  redis.call('ZREMRANGEBYRANK', at.retention, 0, #names - 1)
end

-- The share that the coordinator gave, unless it is over, or from before the store lost its data.
local function share_of(at)
  local text = redis.call('HGET', at.slots, 'share')
  if not text then return nil end
  local number, units, ends, after, longest_us, sent = string.match(text, SHARE)
  local share = {number = tonumber(number), units = tonumber(units), ends = tonumber(ends), after = tonumber(after),
    longest_us = tonumber(longest_us), kept = sent + KEPT_US + longest_us}
  if clock.mono < share.kept and not (clock.data_lost_at and tonumber(sent) <= clock.data_lost_at) then return share end
end

local function in_force(share, base_share, longest_us)
  if share then return clock.mono < share.ends and share.units or share.after end
  if clock.data_lost_at and clock.mono < clock.data_lost_at + KEPT_US + longest_us then return 0 end
  return base_share
end

local function expire_after(at, moment)
  local share = share_of(at)
  local ttl_ms = whole(ms_until(math.max(moment, share and share.kept or 0)) + 1)
  for _, key in pairs(at) do
    redis.call('PEXPIRE', key, ttl_ms)
  end
end

local function write(at, name, slot, remembered_until)
  local text = table.concat({slot.state, whole(slot.units), whole(slot.committed), whole(slot.due),
    whole(slot.longest_us)}, ' ')
  redis.call('HSET', at.slots, name, text)
  redis.call('ZADD', at.retention, whole(remembered_until), name)
  local last = redis.call('ZRANGE', at.retention, -1, -1, 'WITHSCORES')[2]
  expire_after(at, tonumber(last))
end

local function write_taken(at, name, slot)
  redis.call('ZADD', at.deadlines, whole(slot.due), name)
  write(at, name, slot, slot.due + REMEMBERED_US)
end

local function look(key, at)
  local here = place(key)
  run_out(here)
  forget(here)
  local last = redis.call('ZRANGE', here.deadlines, -1, -1, 'WITHSCORES')[2]
  local state = {here = here, limit = tonumber(ARGV[at]), longest_us = ARGV[at + 1] * 1000, last = tonumber(last or 0),
    used = tonumber(redis.call('HGET', here.slots, 'used') or 0), base_share = tonumber(ARGV[at + 2])}
  state.most = state.limit
  if state.base_share < 0 then return state end
  state.share = share_of(here)
  state.limit = math.min(state.most, in_force(state.share, state.base_share, state.longest_us))
  if state.share then state.longest_us = math.min(state.longest_us, state.share.longest_us) end
  return state
end

-- Time until so many units have run out.
local function ms_to_free(at, units)
  local passed = 0
  while true do
    local slots = taken_slots(at, passed, CHUNK)
    for i = 1, #slots, 2 do
      units = units - units_of(at, {slots[i]})
      if units <= 0 then return ms_until(tonumber(slots[i + 1])) end
    end
    passed = passed + CHUNK
  end
end

local function refuse(state, cost, is_enforced)
  local units = state.taken + cost
  if units > state.most and is_enforced or state.used + units > MAX_UNITS then return 'cost_above_limit' end
  if state.used + units > state.limit and is_enforced then
    local lacking = state.used + units - state.limit
    return 'slots_taken', lacking > state.used and SOON_MS or ms_to_free(state.here, lacking)
  end
end

local function hold(state, _, _, cost, name, latest)
  local due = math.min(latest, clock.mono + state.longest_us)
  redis.call('HINCRBY', state.here.slots, 'used', whole(cost))
  if state.base_share < 0 then redis.call('HDEL', state.here.slots, 'base_share')
  else redis.call('HSET', state.here.slots, 'base_share', whole(state.base_share)) end
  state.last = math.max(state.last, due)
  local slot = {state = 'open', units = cost, committed = 0, due = due, longest_us = state.longest_us}
  write_taken(state.here, name, slot)
end

local function tell(state, units)
  return state.limit, math.max(0, state.limit - state.used - units), ms_until(state.last)
end

local function find(key, _, name)
  local here = place(key)
  run_out(here)
  forget(here)
  local text = redis.call('HGET', here.slots, name)
  if not text then return nil end
  local slot = read(text)
  if slot.state == 'open' and slot.due <= clock.mono then slot.state = 'lapsed' end
  local share = redis.call('HEXISTS', here.slots, 'base_share') == 1 and share_of(here)
  if share then slot.longest_us = math.min(slot.longest_us, share.longest_us) end
  slot.here, slot.name, slot.most = here, name, MAX_UNITS
  return slot
end

local function finish(slot, state, units)
  if slot.state == 'open' then
    redis.call('HINCRBY', slot.here.slots, 'used', whole(-slot.units))
    redis.call('ZREM', slot.here.deadlines, slot.name)
  end
  slot.state, slot.committed = state, units
  write(slot.here, slot.name, slot, clock.mono + REMEMBERED_US)
end

local function extend(slot, latest)
  slot.due = math.max(slot.due, math.min(latest, clock.mono + slot.longest_us))
  write_taken(slot.here, slot.name, slot)
end

local function may_extend(slot)
  local used, base_share = unpack(redis.call('HMGET', slot.here.slots, 'used', 'base_share'))
  return not base_share or tonumber(used) <= in_force(share_of(slot.here), tonumber(base_share), slot.longest_us)
end

-- For how much longer slots may be in use that this store has forgotten.
local function forgotten_ms(longest_us) return clock.data_lost_at and ms_until(clock.data_lost_at + longest_us) or 0 end

-- Install a share if it is newer than the one before.
local function install(key, share, sent)
  local here = place(key)
  local known = share_of(here)
  if known and known.number >= share.number then return false end
  redis.call('HSET', here.slots, 'share', table.concat({whole(share.number), whole(share.units), whole(share.ends),
    whole(share.after), whole(share.longest_us), whole(sent)}, ' '))
  local last = redis.call('ZRANGE', here.retention, -1, -1, 'WITHSCORES')[2]
  expire_after(here, tonumber(last or 0))
  return true
end

return {keys = 3, arguments = 3, is_passing = true, look = look, refuse = refuse, tell = tell, hold = hold, find = find,
  finish = finish, extend = extend, may_extend = may_extend, forgotten_ms = forgotten_ms, install = install}
