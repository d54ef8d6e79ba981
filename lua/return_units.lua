-- Return idle units of a lease: they are out of reach here before the return is reported.
--
-- KEYS[1]  fence
-- KEYS[2]  lease
-- KEYS[3]  dirty set of its lane
-- KEYS[4]  usage lines
-- KEYS[5]  holds
-- KEYS[6]  deadlines of the holds
-- ARGV[1]  fingerprint
-- ARGV[2]  epoch
-- ARGV[3]  quota key
-- ARGV[4]  units to keep of the current period
-- ARGV[5]  the waiting lease of the next period: 'keep' or 'return'
-- ARGV[6]  the period that must be the current one; '' for any
-- ARGV[7]  maximum number of units to return; '' for all
-- Returns  {'fenced'} | {'returned', units}
--
-- What was spent of the lease is reported at once, though nothing of it may be returned. An older epoch admits nothing
-- any more, so what is read here of it is final, except what is held: its lease is reported even if nothing is left.

local clock, holds, periods = require('parts/clock'), require('parts/holds'), require('parts/period_change')
local idle, report_due = require('parts/idle'), require('parts/report_due')

local function return_current()
  if ARGV[6] ~= '' and redis.call('HGET', KEYS[2], 'period') ~= ARGV[6] then return 0 end
  return idle.return_idle(KEYS[2], ARGV[3], KEYS[3], '', tonumber(ARGV[4]), tonumber(ARGV[7]))
end

return function()
  local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch', 'mono', 'last')
  if fence[1] ~= ARGV[1] or not fence[2] then return {'fenced'} end
  local mono = clock.read(fence[3], fence[4])
  periods.take_over(KEYS[2], ARGV[3], KEYS[3], mono)
  holds.sweep({lease = KEYS[2], dirty = KEYS[3], lines = KEYS[4], holds = KEYS[5],
    due = KEYS[6], quota = ARGV[3]})
  local units = return_current()
  if ARGV[5] == 'return' then units = units + idle.return_idle(KEYS[2], ARGV[3], KEYS[3], 'next:', 0) end
  local is_left_over = fence[2] ~= ARGV[2] and redis.call('EXISTS', KEYS[2]) == 1
  if is_left_over or redis.call('ZSCORE', KEYS[3], ARGV[3]) then report_due.report_at_once(ARGV[3], KEYS[3]) end
  return {'returned', units}
end
