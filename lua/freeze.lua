-- Freeze what a lane has to report, as the exact bytes that are sent until they are acknowledged.
--
-- KEYS[1]  fence
-- KEYS[2]  lane
-- KEYS[3]  dirty set of the lane
-- then, for each quota:
-- KEYS     lease
-- KEYS     usage lines
-- KEYS     holds
-- KEYS     deadlines of the holds
-- ARGV[1]  fingerprint
-- ARGV[2]  epoch
-- ARGV[3]  lane's number
-- ARGV[4]  maximum number of lines in a batch
-- then, for each quota:
-- ARGV     quota key
-- Returns  {'fenced'} | {'lost', quota key} | {'frozen', bytes, seq, mono, held, more}: `mono` is the store's clock
--          before anything is sent, `held` the units that each quota's current lease has set aside now, `more` is 1 if
--          another batch follows at once
--
-- While a batch waits for its receipt, the same bytes are returned, so there is never a second one in flight. An older
-- epoch's usage may be frozen, too: only the fingerprint is compared, and the epoch is in the keys' names. In an older
-- epoch no period changes any more.
--
-- `lost`: a quota has something to report, or units that are held, and its lease is gone. The store has lost data, so
-- its epoch is over. Nothing has changed then.
--
-- A batch is bounded in leases, lines and bytes, and so is the time that this script takes. Lines that do not fit stay
-- for the next batch, and the quota stays dirty. Then `consumed` is reported only as far as the lines of this batch and
-- of those before cover it (parts/pieces). With the last piece, and for quotas whose lines fit, it is the lease's own
-- count. That is kept apart from the lines on purpose: the coordinator compares the two.

local clock, holds, pieces = require('parts/clock'), require('parts/holds'), require('parts/pieces')
local periods, ended_periods = require('parts/period_change'), require('parts/ended_period')

local MAX_LEASES = 100
local MAX_BYTES = 256 * 1024 -- a batch may exceed it by one quota's totals

-- The index of a quota's first key.
local function key_of(i) return 4 + (i - 5) * 4 end

local function held()
  local units = {}
  for i = 5, #ARGV do units[i - 4] = tonumber(redis.call('HGET', KEYS[key_of(i)], 'held') or 0) end
  return units
end

local function is_lost(i)
  local key = key_of(i)
  return redis.call('EXISTS', KEYS[key]) == 0
    and (redis.call('ZSCORE', KEYS[3], ARGV[i]) or redis.call('EXISTS', KEYS[key + 2]) == 1)
end

local function whole(number) return string.format('%.0f', number) end

local function answer(bytes, seq, more)
  local is_next_due = more and redis.call('ZCOUNT', KEYS[3], '-inf', whole(clock.mono)) > 0
  return {'frozen', bytes, tonumber(seq), whole(clock.mono), held(), is_next_due and 1 or 0}
end

local function json_of(lines)
  local texts = {}
  for i, line in ipairs(lines) do texts[i] = line.text end
  return table.concat(texts, ',')
end

-- The periods of a lease to report, the oldest first: those that have ended here, the current one and the next.
local function periods_of(lease)
  local all, fields, ended_names, found = redis.call('HGETALL', lease), {}, {}, {}
  for i = 1, #all, 2 do fields[all[i]] = all[i + 1] end
  for name in pairs(fields) do ended_names[#ended_names + 1] = string.match(name, '^ended:(.*)$') end
  table.sort(ended_names)
  for _, period in ipairs(ended_names) do
    local ended = ended_periods.read(lease, period)
    found[#found + 1] = {period = period, granted = whole(ended.granted), overage = whole(ended.overage),
      consumed = ended.consumed, returned = whole(ended.returned), overdrawn = whole(ended.overdrawn), ended = ended}
  end
  if fields['period'] then
    found[#found + 1] = {period = fields['period'], granted = fields['granted'], overage = fields['overage'],
      consumed = tonumber(fields['consumed'] or 0), returned = fields['returned'] or '0',
      overdrawn = fields['overdrawn'] or '0'}
  end
  if fields['next:period'] then
    found[#found + 1] = {period = fields['next:period'], granted = fields['next:granted'],
      overage = fields['next:overage'], consumed = 0, returned = fields['next:returned'] or '0', overdrawn = '0'}
  end
  return found, fields
end

local function report(batch, quota, each, consumed, lines)
  local text = '{"quota":' .. cjson.encode(quota) .. ',"period":' .. cjson.encode(each.period)
    .. ',"granted":' .. each.granted .. ',"overage":' .. each.overage
    .. ',"consumed":' .. whole(consumed) .. ',"returned":' .. each.returned
    .. (each.overdrawn ~= '0' and ',"overdrawn":' .. each.overdrawn or '')
    .. ',"lines":[' .. json_of(lines) .. ']}'
  batch.leases[#batch.leases + 1] = text
  batch.bytes_left = batch.bytes_left - #text
end

-- Add a quota to the batch. Return false, with nothing changed, if its periods do not fit in any more.
local function freeze(batch, quota, key, is_last)
  local lease, lines = KEYS[key], KEYS[key + 1]
  if batch.is_current then periods.take_over(lease, quota, KEYS[3], clock.mono) end
  holds.sweep({lease = lease, lines = lines, dirty = KEYS[3], holds = KEYS[key + 2], due = KEYS[key + 3],
    quota = quota})
  local found, fields = periods_of(lease)
  if #batch.leases > 0 and #batch.leases + #found > MAX_LEASES then return false end
  local is_whole = #found <= MAX_LEASES
  -- A quota takes half of the room that is left, so one with very many lines does not crowd out those behind it.
  local room = is_last and batch.lines_left or math.ceil(batch.lines_left / 2)
  local by_period, taken, is_complete = pieces.take(lines, found, room, batch.bytes_left)
  for i = 1, math.min(#found, MAX_LEASES) do
    local each = found[i]
    local own_lines = by_period[each.period]
    local consumed = pieces.covered(batch.first_seq, lines, fields, each, own_lines.units, is_complete)
    report(batch, quota, each, consumed, own_lines)
    batch.counted[#batch.counted + 1] = {lease, each.period, consumed}
    for _, line in ipairs(own_lines) do batch.dropped[#batch.dropped + 1] = {lines, line.field} end
    if each.ended then
      each.ended.reported_seq = is_complete and batch.seq or 0
      batch.reported[#batch.reported + 1] = {lease, each.period, each.ended}
    end
  end
  batch.lines_left = batch.lines_left - taken
  batch.oldest = math.min(batch.oldest, tonumber(fields['unreported_since'] or batch.oldest))
  if #found > 0 then batch.touched[#batch.touched + 1] = lease end
  local quotas = is_whole and is_complete and batch.cleaned or batch.left_over
  quotas[#quotas + 1] = quota
  return true
end

-- Write the batch: what leaves the lines is in its bytes.
local function write(batch, bytes)
  redis.call('HSET', KEYS[2], 'frozen', bytes, 'frozen_seq', whole(batch.seq), 'pieces_from', whole(batch.first_seq),
    'pieces_to', whole(batch.seq), 'frozen_since', whole(batch.oldest))
  for _, line in ipairs(batch.dropped) do redis.call('HDEL', line[1], line[2]) end
  for _, each in ipairs(batch.reported) do ended_periods.write(each[1], each[2], each[3]) end
  for _, each in ipairs(batch.counted) do pieces.write(each[1], each[2], each[3], batch.seq) end
  for _, lease in ipairs(batch.touched) do redis.call('HSET', lease, 'reported', whole(clock.mono)) end
  for _, quota in ipairs(batch.cleaned) do redis.call('ZREM', KEYS[3], quota) end
  for _, quota in ipairs(batch.left_over) do redis.call('ZADD', KEYS[3], 0, quota) end
end

return function()
  local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'mono', 'last', 'epoch')
  if fence[1] ~= ARGV[1] then return {'fenced'} end
  clock.read(fence[2], fence[3])
  local is_current = fence[4] == ARGV[2]
  for i = 5, #ARGV do
    if is_current and is_lost(i) then return {'lost', ARGV[i]} end
  end

  local lane = redis.call('HMGET', KEYS[2], 'seq', 'frozen', 'frozen_seq', 'pieces_from', 'pieces_to')
  if lane[2] then return answer(lane[2], lane[3], true) end
  local seq = tonumber(lane[1] or 0) + 1
  local batch = {seq = seq, first_seq = pieces.first_seq(seq, lane[4], lane[5]), is_current = is_current,
    leases = {}, dropped = {}, cleaned = {}, left_over = {}, reported = {}, counted = {}, touched = {},
    oldest = clock.mono, lines_left = tonumber(ARGV[4]), bytes_left = MAX_BYTES}
  for i = 5, #ARGV do
    local has_room = batch.lines_left > 0 and batch.bytes_left > 0
    if not has_room or not freeze(batch, ARGV[i], key_of(i), i == #ARGV) then break end
  end
  local bytes = '{"epoch":' .. ARGV[2] .. ',"lane":' .. ARGV[3] .. ',"seq":' .. whole(seq)
    .. ',"leases":[' .. table.concat(batch.leases, ',') .. ']}'
  -- From here on nothing may fail.
  write(batch, bytes)
  return answer(bytes, seq, #batch.dropped > 0 or #batch.cleaned > 0)
end
