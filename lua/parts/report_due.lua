-- When a quota's usage is reported: at once after a quiet time, and then after pauses that double up to its bound.
--
-- KEYS     none: the names of a lease and of its lane's dirty set are arguments
-- ARGV     none
-- Returns  {note_usage, report_at_once}: the first is a function of a lease, its quota, the dirty set and the store's
--          clock, the second of the quota and the dirty set
--
-- The dirty set has the quotas that have something to report. A score is the moment when the report is due, on the
-- store's clock; 0 is at once. Any exchange of the quota reports everything, so a report is mostly sent with a request
-- for units. The coordinator sets the longest pause, `report_within`, for each lease.

local FIRST_PAUSE_US = 1000000

local function number(text) return tonumber(text or 0) end
local function whole(units) return string.format('%.0f', units) end

-- Schedule the report of new usage, unless there is an older one that is yet to be reported.
local function note_usage(lease, quota, dirty, mono)
  if redis.call('ZSCORE', dirty, quota) then return end
  local f = redis.call('HMGET', lease, 'report_within', 'reported', 'report_pause')
  local longest, reported = number(f[1]) * 1000, number(f[2])
  local is_quiet = mono - reported >= longest
  local pause = is_quiet and 0 or math.min(longest, math.max(FIRST_PAUSE_US, 2 * number(f[3])))
  redis.call('ZADD', dirty, whole(math.max(mono, reported + pause)), quota)
  redis.call('HSET', lease, 'report_pause', whole(pause), 'unreported_since', whole(mono))
end

local function report_at_once(quota, dirty) redis.call('ZADD', dirty, 0, quota) end

return {note_usage = note_usage, report_at_once = report_at_once}
