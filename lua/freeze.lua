-- Freeze what is to be reported of a lane, as the exact bytes that are sent until they are acknowledged.
--
-- KEYS  1 the fence   2 the lane   3 its dirty set   then, for each quota in turn: its lease, its usage lines,
--         its holds, when each of them is due
-- ARGV  1 fingerprint   2 epoch   3 lane   4 how many lines are enough   then, for each quota in turn: its key
-- Gives {'fenced'} | {'lost', quota key} | {'frozen', bytes, seq, mono, held}; mono is the store's clock before anything is sent, held for
--       each quota the units that are set aside of its current lease, as it is now
--
-- While a batch waits for its receipt it is given again, unchanged: there is never a second one in flight. An older
-- epoch's evidence may be frozen too, so only the fingerprint is compared; the epoch is in the keys' names. In such a
-- one no period gives way to the next any more.
-- `lost`: a quota has something to report or units that are held, and its lease is gone. The store has forgotten data,
-- and so its epoch is over. Nothing was changed then.
-- Usage lines and the consumed total are kept apart on purpose: the coordinator compares the two counts.

local MOST_LEASES = 400 -- a message carries 500, and the last quota may add several
local MOST_LINES = 50000 -- of a lease, that a message carries

local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'mono', 'last', 'epoch')
if fence[1] ~= ARGV[1] then return {'fenced'} end
local mono, now = require('parts/clock')(fence[2], fence[3])
local holds, over = require('parts/holds')(mono, now), require('parts/was')

-- The keys of a quota begin here.
local function key_of(i) return 4 + (i - 5) * 4 end

local function held()
  local units = {}
  for i = 5, #ARGV do units[i - 4] = tonumber(redis.call('HGET', KEYS[key_of(i)], 'held') or 0) end
  return units
end

local function is_lost(i)
  local key = key_of(i)
  return redis.call('EXISTS', KEYS[key]) == 0
    and (redis.call('SISMEMBER', KEYS[3], ARGV[i]) == 1 or redis.call('EXISTS', KEYS[key + 2]) == 1)
end

if fence[4] == ARGV[2] then
  for i = 5, #ARGV do
    if is_lost(i) then return {'lost', ARGV[i]} end
  end
end

local lane = redis.call('HMGET', KEYS[2], 'seq', 'frozen', 'frozen_seq')
if lane[2] then return {'frozen', lane[2], tonumber(lane[3]), string.format('%.0f', mono), held()} end

local function whole(number) return string.format('%.0f', number) end

-- Without what a policy's `usage_by` adds, of which there may be any number: as many lines as minutes are left.
local function coarse(dimensions)
  local policy = string.match(dimensions, '"policy":"[^"]*"')
  return policy and '{' .. policy .. '}' or dimensions
end

-- The usage lines of one quota: {period = {{minute and dimensions, units}, …}}, and each line's field and period.
local function lines_of(key)
  local by_period, fields, units = {}, {}, {}
  local all = redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    fields[#fields + 1] = all[i]
    units[all[i]] = all[i + 1]
  end
  table.sort(fields)
  local periods = {}
  for i, field in ipairs(fields) do
    local period, minute, dimensions = string.match(field, '^([^|]*)|(%d+)|(.*)$')
    if #fields > MOST_LINES then dimensions = coarse(dimensions) end
    local label = '{"minute":' .. minute .. ',"dimensions":' .. dimensions
    local lines = by_period[period] or {}
    lines[label] = lines[label] or {label, 0}
    if lines[label][2] == 0 then lines[#lines + 1] = lines[label] end
    lines[label][2] = lines[label][2] + tonumber(units[field])
    by_period[period], periods[i] = lines, period
  end
  return by_period, fields, periods
end

local function json_of(lines)
  local texts = {}
  for i, line in ipairs(lines) do texts[i] = line[1] .. ',"units":' .. whole(line[2]) .. '}' end
  return table.concat(texts, ',')
end

local leases, dropped, cleaned, told = {}, {}, {}, {}
local seq = tonumber(lane[1] or 0) + 1

local function freeze(quota, key)
  local lease, lines = KEYS[key], KEYS[key + 1]
  if fence[4] == ARGV[2] then require('parts/take_over').take_over(lease, quota, KEYS[3], mono) end
  holds.sweep({lease = lease, lines = lines, dirty = KEYS[3], holds = KEYS[key + 2], due = KEYS[key + 3],
    quota = quota})
  local by_period, line_fields, line_periods = lines_of(lines)
  local reported = {}
  local function report(period, granted, overage, consumed, returned, overdrawn)
    leases[#leases + 1] = '{"quota":' .. cjson.encode(quota) .. ',"period":' .. cjson.encode(period)
      .. ',"granted":' .. granted .. ',"overage":' .. overage
      .. ',"consumed":' .. consumed .. ',"returned":' .. returned
      .. (overdrawn and overdrawn ~= '0' and ',"overdrawn":' .. overdrawn or '')
      .. ',"lines":[' .. json_of(by_period[period] or {}) .. ']}'
    reported[period] = true
  end
  local f = redis.call('HGETALL', lease)
  local fields = {}
  for j = 1, #f, 2 do fields[f[j]] = f[j + 1] end
  -- Totals of periods that are over here and wait to be reported for the last time, the oldest first.
  local ended = {}
  for name in pairs(fields) do ended[#ended + 1] = string.match(name, '^was:(.*)$') end
  table.sort(ended)
  for _, period in ipairs(ended) do
    local was = over.read(lease, period)
    report(period, whole(was.granted), whole(was.overage), whole(was.consumed), whole(was.returned),
      whole(was.overdrawn))
    was.told = seq
    told[#told + 1] = {lease, period, was}
  end
  if fields['period'] then
    report(fields['period'], fields['granted'], fields['overage'], fields['consumed'] or '0', fields['returned'] or '0',
      fields['overdrawn'])
  end
  if fields['next:period'] then
    report(fields['next:period'], fields['next:granted'], fields['next:overage'], '0', fields['next:returned'] or '0')
  end
  -- A line whose lease is not known cannot be reported; it stays, for people to look at.
  for i, field in ipairs(line_fields) do
    if reported[line_periods[i]] then dropped[#dropped + 1] = {lines, field} end
  end
  cleaned[#cleaned + 1] = quota
end

for i = 5, #ARGV do
  if #dropped >= tonumber(ARGV[4]) or #leases >= MOST_LEASES then break end
  freeze(ARGV[i], key_of(i))
end

local bytes = '{"epoch":' .. ARGV[2] .. ',"lane":' .. ARGV[3] .. ',"seq":' .. whole(seq)
  .. ',"leases":[' .. table.concat(leases, ',') .. ']}'

-- From here on nothing may fail: what leaves the lines is in the bytes.
redis.call('HSET', KEYS[2], 'frozen', bytes, 'frozen_seq', whole(seq))
for _, line in ipairs(dropped) do redis.call('HDEL', line[1], line[2]) end
for _, ended in ipairs(told) do over.write(ended[1], ended[2], ended[3]) end
for _, quota in ipairs(cleaned) do redis.call('SREM', KEYS[3], quota) end
return {'frozen', bytes, seq, whole(mono), held()}
