-- The change of a lease's period. The store does it alone: no agent and no coordinator has to take part.
--
-- KEYS     none: the names of a lease and of its lane's dirty set are arguments
-- ARGV     none
-- Returns  {take_over, displace, switch_to}, functions of a lease, its quota and the dirty set; the first also of the
--          store's clock, the last of a period and what was used of it
--
-- The lease of the next period waits beside the current one, in fields `next:*`. From the moment when it starts, on the
-- store's clock, it is the current one: the script that touches the lease next makes it so before anything else.
--
-- `switch_to` makes any period the current one, also one that began before the current period, and one that was current
-- before: a quota's `period` may change, and change back. The totals of the period that is replaced are kept until they
-- are reported, as at the end of a period.

local NEXT = {'next:period', 'next:granted', 'next:overage', 'next:returned', 'next:unallocated', 'next:expires',
  'next:ends', 'next:first_minute', 'next:last_minute', 'next:last_grant', 'next:overdraft', 'next:report_within',
  'next:report_at', 'next:starts'}

-- Fields that belong to a period.
local OF_PERIOD = {'granted', 'overage', 'unallocated', 'expires', 'ends', 'first_minute', 'last_minute', 'last_grant',
  'overdraft', 'overdrawn', 'owed', 'report_within', 'report_at'}

local ended_periods, report_due = require('parts/ended_period'), require('parts/report_due')

local function number(text) return tonumber(text or 0) end

-- End a period here: return what its lease has left, except what is held, and keep its totals for their last report.
local function retire(lease, quota, dirty, prefix)
  local f = redis.call('HMGET', lease, prefix .. 'period', prefix .. 'granted', prefix .. 'overage',
    prefix .. 'consumed', prefix .. 'returned', prefix .. 'held', prefix .. 'holds', prefix .. 'overdrawn')
  if not f[1] then return end
  local ended = {granted = number(f[2]), overage = number(f[3]), consumed = number(f[4]), returned = number(f[5]),
    reported_seq = 0, held = number(f[6]), holds = number(f[7]), overdrawn = number(f[8])}
  ended.returned = math.max(ended.returned, ended.granted + ended.overage - ended.consumed - ended.held)
  ended_periods.write(lease, f[1], ended)
  report_due.report_at_once(quota, dirty)
end

-- Make the waiting lease the current one if its period has begun.
local function take_over(lease, quota, dirty, mono)
  local f = redis.call('HMGET', lease, unpack(NEXT))
  local starts = f[#NEXT]
  if not starts or mono < tonumber(starts) then return end
  retire(lease, quota, dirty, '')
  redis.call('HSET', lease, 'consumed', 0, 'returned', 0, 'held', 0, 'holds', 0)
  redis.call('HDEL', lease, 'overdraft', 'overdrawn', 'owed')
  for i = 1, #NEXT - 1 do
    if f[i] then redis.call('HSET', lease, string.sub(NEXT[i], 6), f[i]) end
  end
  redis.call('HDEL', lease, unpack(NEXT))
end

-- Drop the waiting lease, because the quota's periods have changed: one that comes before it replaces it.
local function displace(lease, quota, dirty)
  retire(lease, quota, dirty, 'next:')
  redis.call('HDEL', lease, unpack(NEXT))
end

-- Make a period the current one. `used`: what the region consumed and returned of it, if this store has no record.
local function switch_to(lease, quota, dirty, period, used)
  if redis.call('HGET', lease, 'next:period') == period then return take_over(lease, quota, dirty, math.huge) end
  displace(lease, quota, dirty)
  retire(lease, quota, dirty, '')
  redis.call('HDEL', lease, unpack(OF_PERIOD))
  local kept = ended_periods.read(lease, period) or {granted = 0, overage = 0, consumed = used.consumed,
    returned = used.returned, held = 0, holds = 0, overdrawn = 0}
  redis.call('HDEL', lease, 'ended:' .. period)
  redis.call('HSET', lease, 'period', period)
  for _, name in ipairs({'granted', 'overage', 'consumed', 'returned', 'held', 'holds'}) do
    redis.call('HSET', lease, name, string.format('%.0f', kept[name]))
  end
  if kept.overdrawn > 0 then -- `settle` computes how much of it is still owed
    redis.call('HSET', lease, 'overdrawn', string.format('%.0f', kept.overdrawn), 'owed',
      string.format('%.0f', kept.overdrawn))
  end
end

return {take_over = take_over, displace = displace, switch_to = switch_to}
