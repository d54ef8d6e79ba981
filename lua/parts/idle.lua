-- Return idle units of a lease, those that are neither consumed nor held: from then on none of them is spent here.
--
-- KEYS     none: the names of a lease and of its lane's dirty set are arguments
-- ARGV     none
-- Returns  {return_idle}, a function of a lease, its quota, the dirty set, the prefix of its period's fields ('': the
--          current one, 'next:': the next), the units to keep, and the most to return, nil for all. It returns how many
--          units these were

local report_due = require('parts/report_due')

local function number(text) return tonumber(text or 0) end

local function return_idle(lease, quota, dirty, prefix, keep, most)
  local f = redis.call('HMGET', lease, prefix .. 'granted', prefix .. 'overage', prefix .. 'consumed',
    prefix .. 'returned', prefix .. 'held')
  local units = number(f[1]) + number(f[2]) - number(f[3]) - number(f[4]) - number(f[5]) - keep
  units = math.min(units, most or units)
  if units <= 0 then return 0 end
  redis.call('HINCRBY', lease, prefix .. 'returned', string.format('%.0f', units))
  report_due.report_at_once(quota, dirty)
  return units
end

return {return_idle = return_idle}
