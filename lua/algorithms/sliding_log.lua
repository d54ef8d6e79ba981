-- A sliding log: no window, wherever it begins, has more than the limit.
--
-- State    a log of admissions, the oldest first, each entry its moment and its units; and beside the share `used`, the
--          units in the log, and `newest`, its last moment. It expires when that is out of the window.
-- KEYS[1]  the packed state (parts/share)
-- KEYS[2]  the log, a list
-- ARGV[1]  rate_micro
-- ARGV[2]  units in a window: the base share
-- ARGV[3]  the window, ms
-- Returns  the algorithm. It is exact and the most expensive: one entry for each request, or for a run of equal ones,
--          so its limit is bounded where it is declared.

local clock, number, share = require('parts/clock'), require('parts/number'), require('parts/share')
local MAX_UNITS, CHUNK = 9007199254740991, 64

-- Walk through the log from entry `from` on until `is_enough(moment, units)`, and return how many entries were passed.
local function walk(log, from, is_enough)
  local passed = from
  while true do
    local entries = redis.call('LRANGE', log, passed, passed + CHUNK - 1)
    for _, entry in ipairs(entries) do
      if is_enough(struct.unpack('<dd', entry)) then return passed end
      passed = passed + 1
    end
    if #entries < CHUNK then return passed end
  end
end

local function look(key, at)
  local state = share.look(KEYS[key], share.LAYOUTS.log, number(ARGV[at]), number(ARGV[at + 1]))
  local window = ARGV[at + 2] * 1000
  local mono, used, newest, over, is_over = clock.mono, 0, clock.mono, 0, true
  if state.remembered ~= '' then used, newest = struct.unpack('<dd', state.remembered) end
  if used > 0 and newest + window > mono then
    over = walk(KEYS[key + 1], 0, function(moment, units)
      if moment + window > mono then
        is_over = false
        return true
      end
      used = used - units
    end)
  end
  if is_over then used = 0 end -- and the log has expired, or is about to
  state.log, state.window, state.used, state.newest = KEYS[key + 1], window, used, newest
  state.over, state.is_over = over, is_over
  return state
end

-- Time until so many units are out of the window. Units that are not in the log yet were taken now.
local function ms_to_free(state, units)
  local free_at = clock.mono + state.window
  if not state.is_over then
    walk(state.log, state.over, function(moment, freed)
      units = units - freed
      if units <= 0 then free_at = moment + state.window end
      return units <= 0
    end)
  end
  return math.ceil((free_at - clock.mono) / 1000)
end

local function refuse(state, cost, is_enforced)
  local units = state.taken + cost
  if units > state.burst and is_enforced or state.used + units > MAX_UNITS then return 'cost_above_limit' end
  if state.used + units > state.burst and is_enforced then
    return 'rate_exceeded', ms_to_free(state, state.used + units - state.burst)
  end
end

local function take(state)
  share.take(state, state.used)
  state.used = state.used + state.taken
  if state.taken > 0 then state.newest = clock.mono end
end

-- Remove so many units from the log, the newest first.
local function remove(log, units)
  local passed, rest = 0, nil
  while units > 0 do
    local entries = redis.call('LRANGE', log, -passed - CHUNK, -passed - 1)
    for i = #entries, 1, -1 do
      local moment, taken = struct.unpack('<dd', entries[i])
      passed, units = passed + 1, units - taken
      if units < 0 then rest = struct.pack('<dd', moment, -units) end
      if units <= 0 then break end
    end
    if #entries < CHUNK then break end
  end
  redis.call('LTRIM', log, 0, -passed - 1)
  if rest then redis.call('RPUSH', log, rest) end
end

local function keep(state, key, _, units)
  if state.is_over then redis.call('DEL', state.log) elseif state.over > 0 then
    redis.call('LTRIM', state.log, state.over, -1)
  end
  state.is_over, state.over = false, 0
  local ttl_ms = state.window / 1000
  if units < 0 then remove(state.log, -units)
  else redis.call('RPUSH', state.log, struct.pack('<dd', clock.mono, units)) end
  redis.call('PEXPIRE', state.log, string.format('%.0f', ttl_ms + 1))
  share.keep(KEYS[key], state, struct.pack('<dd', state.used, state.newest), ttl_ms)
end

local function tell(state, taken)
  local used = math.max(0, state.used + taken)
  local newest = taken > 0 and clock.mono or state.newest
  local reset_ms = used > 0 and math.ceil((newest + state.window - clock.mono) / 1000) or 0
  return state.burst, math.max(0, state.burst - used), reset_ms
end

return {keys = 2, arguments = 3, look = look, refuse = refuse, take = take, keep = keep, tell = tell}
