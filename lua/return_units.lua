-- Stop first, then tell: what is given back is out of reach here before anyone hears of it.
--
-- KEYS  1 the fence   2 the lease   3 its lane's dirty set   4 its usage lines   5 its holds   6 when each is due
-- ARGV  1 fingerprint   2 epoch   3 quota key   4 how much to keep of the current period
--       5 what of the lease that waits for the next one: 'keep' or 'return'
--       6 the period that must be the current one, or '' for any   7 at most so many units of it, or '' for all
-- Gives {'fenced'} | {'returned', units}
--
-- An older epoch admits nothing any more, so what is read here of it is final, but for what is held: it is told even if
-- nothing is left.

local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch', 'mono', 'last')
if fence[1] ~= ARGV[1] or not fence[2] then return {'fenced'} end
local mono, now = require('parts/clock')(fence[3], fence[4])
local periods, holds = require('parts/period_change'), require('parts/holds')(mono, now)
periods.take_over(KEYS[2], ARGV[3], KEYS[3], mono)
holds.sweep({lease = KEYS[2], dirty = KEYS[3], lines = KEYS[4], holds = KEYS[5],
  due = KEYS[6], quota = ARGV[3]})

local function number(text) return tonumber(text or 0) end

local function give_back(prefix, keep, most)
  local f = redis.call('HMGET', KEYS[2], prefix .. 'granted', prefix .. 'overage', prefix .. 'consumed',
    prefix .. 'returned', prefix .. 'held')
  local units = number(f[1]) + number(f[2]) - number(f[3]) - number(f[4]) - number(f[5]) - keep
  units = math.min(units, most or units)
  if units <= 0 then return 0 end
  redis.call('HINCRBY', KEYS[2], prefix .. 'returned', string.format('%.0f', units))
  redis.call('SADD', KEYS[3], ARGV[3])
  return units
end

local function give_back_current()
  if ARGV[6] ~= '' and redis.call('HGET', KEYS[2], 'period') ~= ARGV[6] then return 0 end
  return give_back('', tonumber(ARGV[4]), tonumber(ARGV[7]))
end

local units = give_back_current()
if ARGV[5] == 'return' then units = units + give_back('next:', 0) end
if fence[2] ~= ARGV[2] and redis.call('EXISTS', KEYS[2]) == 1 then redis.call('SADD', KEYS[3], ARGV[3]) end
return {'returned', units}
