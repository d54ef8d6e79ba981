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

local MAX_LEASES = 100
local MAX_BYTES = 256 * 1024 -- a batch may exceed it by one quota's totals

local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'mono', 'last', 'epoch')
if fence[1] ~= ARGV[1] then return {'fenced'} end
local mono, now = require('parts/clock')(fence[2], fence[3])
local holds, ended_periods = require('parts/holds')(mono, now), require('parts/ended_period')

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

if fence[4] == ARGV[2] then
  for i = 5, #ARGV do
    if is_lost(i) then return {'lost', ARGV[i]} end
  end
end

local function whole(number) return string.format('%.0f', number) end

local function answer(bytes, seq, more)
  local is_next_due = more and redis.call('ZCOUNT', KEYS[3], '-inf', whole(mono)) > 0
  return {'frozen', bytes, tonumber(seq), whole(mono), held(), is_next_due and 1 or 0}
end

local lane = redis.call('HMGET', KEYS[2], 'seq', 'frozen', 'frozen_seq', 'pieces_from', 'pieces_to')
if lane[2] then return answer(lane[2], lane[3], true) end

local seq = tonumber(lane[1] or 0) + 1
local pieces = require('parts/pieces')(seq, lane[4], lane[5])
local leases, dropped, cleaned, left_over, reported, counted, touched = {}, {}, {}, {}, {}, {}, {}
local oldest = mono -- usage in this batch
local lines_left, bytes_left = tonumber(ARGV[4]), MAX_BYTES

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

local function report(quota, each, consumed, lines)
  local text = '{"quota":' .. cjson.encode(quota) .. ',"period":' .. cjson.encode(each.period)
    .. ',"granted":' .. each.granted .. ',"overage":' .. each.overage
    .. ',"consumed":' .. whole(consumed) .. ',"returned":' .. each.returned
    .. (each.overdrawn ~= '0' and ',"overdrawn":' .. each.overdrawn or '')
    .. ',"lines":[' .. json_of(lines) .. ']}'
  leases[#leases + 1] = text
  bytes_left = bytes_left - #text
end

-- Add a quota to the batch. Return false, with nothing changed, if its periods do not fit in any more.
local function freeze(quota, key, is_last)
  local lease, lines = KEYS[key], KEYS[key + 1]
  if fence[4] == ARGV[2] then require('parts/period_change').take_over(lease, quota, KEYS[3], mono) end
  holds.sweep({lease = lease, lines = lines, dirty = KEYS[3], holds = KEYS[key + 2], due = KEYS[key + 3],
    quota = quota})
  local periods, fields = periods_of(lease)
  if #leases > 0 and #leases + #periods > MAX_LEASES then return false end
  local is_whole = #periods <= MAX_LEASES
  -- A quota takes half of the room that is left, so one with very many lines does not crowd out those behind it.
  local room = is_last and lines_left or math.ceil(lines_left / 2)
  local by_period, taken, is_complete = pieces.take(lines, periods, room, bytes_left)
  for i = 1, math.min(#periods, MAX_LEASES) do
    local each = periods[i]
    local own_lines = by_period[each.period]
    local consumed = pieces.covered(lines, fields, each, own_lines.units, is_complete)
    report(quota, each, consumed, own_lines)
    counted[#counted + 1] = {lease, each.period, consumed}
    for _, line in ipairs(own_lines) do dropped[#dropped + 1] = {lines, line.field} end
    if each.ended then
      each.ended.reported_seq = is_complete and seq or 0
      reported[#reported + 1] = {lease, each.period, each.ended}
    end
  end
  lines_left = lines_left - taken
  oldest = math.min(oldest, tonumber(fields['unreported_since'] or mono))
  if #periods > 0 then touched[#touched + 1] = lease end
  if is_whole and is_complete then cleaned[#cleaned + 1] = quota else left_over[#left_over + 1] = quota end
  return true
end

for i = 5, #ARGV do
  if lines_left <= 0 or bytes_left <= 0 or not freeze(ARGV[i], key_of(i), i == #ARGV) then break end
end

local bytes = '{"epoch":' .. ARGV[2] .. ',"lane":' .. ARGV[3] .. ',"seq":' .. whole(seq)
  .. ',"leases":[' .. table.concat(leases, ',') .. ']}'

-- From here on nothing may fail: what leaves the lines is in the bytes.
redis.call('HSET', KEYS[2], 'frozen', bytes, 'frozen_seq', whole(seq), 'pieces_from', whole(pieces.from),
  'pieces_to', whole(seq), 'frozen_since', whole(oldest))
for _, line in ipairs(dropped) do redis.call('HDEL', line[1], line[2]) end
for _, each in ipairs(reported) do ended_periods.write(each[1], each[2], each[3]) end
for _, each in ipairs(counted) do pieces.write(each[1], each[2], each[3]) end
for _, lease in ipairs(touched) do redis.call('HSET', lease, 'reported', whole(mono)) end
for _, quota in ipairs(cleaned) do redis.call('ZREM', KEYS[3], quota) end
for _, quota in ipairs(left_over) do redis.call('ZADD', KEYS[3], 0, quota) end
return answer(bytes, seq, #dropped > 0 or #cleaned > 0)
