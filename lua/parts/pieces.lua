-- Pieces of a quota's usage lines: as many as a batch has room for, and how much of `consumed` they cover.
--
-- KEYS     none: the names of a quota's usage lines and lease are arguments
-- ARGV     none
-- Returns  {first_seq, take, covered, write}; `first_seq` is a function of the seq of the batch that is made, and of
--          the lane's `pieces_from` and `pieces_to`
--
-- `reported:PERIOD` of a lease has two numbers: the consumed total that the last batch reported of the period, and that
-- batch's seq. It is valid if every batch of the lane since then was made by a script that writes it: those from
-- `pieces_from` to `pieces_to`. A release before did not write it; then all lines are added up, once.

local MAX_SCANNED = 5000 -- lines read for one batch: those of a period without a lease are never taken
local PAGE = 100
local LINE = '^([^|]*)|(%d+)|(.*)$'

local function whole(number) return string.format('%.0f', number) end

-- Visit the fields of a hash until `look` returns false. Return whether all were visited.
local function scan(key, look)
  local cursor = '0'
  repeat
    local page = redis.call('HSCAN', key, cursor, 'COUNT', PAGE)
    cursor = page[1]
    for i = 1, #page[2], 2 do
      if not look(page[2][i], page[2][i + 1]) then return false end
    end
  until cursor == '0'
  return true
end

-- Take at most so many lines of some periods, of about so many bytes. Return them by period, each with their sum in
-- `units`; their number; and whether there are no more.
local function take(key, periods, most, most_bytes)
  local by_period, seen, taken, scanned, bytes = {}, {}, 0, 0, 0
  for _, each in ipairs(periods) do by_period[each.period] = {units = 0} end
  local is_complete = scan(key, function(field, value)
    local period, minute, dimensions = string.match(field, LINE)
    local lines = by_period[period]
    scanned = scanned + 1
    if not lines or seen[field] then return scanned < MAX_SCANNED end
    if taken >= most or bytes >= most_bytes then return false end
    local units = tonumber(value)
    local text = '{"minute":' .. minute .. ',"dimensions":' .. dimensions .. ',"units":' .. whole(units) .. '}'
    lines[#lines + 1] = {field = field, text = text}
    lines.units, seen[field], taken, bytes = lines.units + units, true, taken + 1, bytes + #text
    return scanned < MAX_SCANNED
  end)
  for _, lines in pairs(by_period) do
    table.sort(lines, function(one, other) return one.field < other.field end)
  end
  return by_period, taken, is_complete
end

local function sum_of(key, period)
  local units, seen = 0, {}
  scan(key, function(field, value)
    if not seen[field] and string.match(field, LINE) == period then units = units + tonumber(value) end
    seen[field] = true
    return true
  end)
  return units
end

-- The first batch in a row since which each lease has `reported:PERIOD`.
local function first_seq(seq, from, to) return from and to == whole(seq - 1) and tonumber(from) or seq end

local function reported_before(first, key, fields, each)
  local units, at = string.match(fields['reported:' .. each.period] or '', '^(%d+) (%d+)$')
  if at and tonumber(at) >= first then return tonumber(units) end
  return each.consumed - sum_of(key, each.period)
end

-- The consumed total to report of a period whose lines in this batch have so many units.
local function covered(first, key, fields, each, units, is_complete)
  if is_complete then return each.consumed end
  return math.min(each.consumed, reported_before(first, key, fields, each) + units)
end

local function write(lease, period, consumed, seq)
  redis.call('HSET', lease, 'reported:' .. period, whole(consumed) .. ' ' .. whole(seq))
end

return {first_seq = first_seq, take = take, covered = covered, write = write}
