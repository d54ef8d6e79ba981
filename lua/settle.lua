-- Take in the coordinator's reply to an exchange: drop the batch that it acknowledges, install what it grants.
--
-- KEYS  1 the fence   2 the lane   3 its dirty set   then for each lease itself and its holds
-- ARGV  1 fingerprint   2 epoch   3 seq that was acknowledged, or 0   4 mono when the request was made
--       5 number of leases
--       then, for each lease, oldest period first, fourteen: quota key, period, granted, overage, unallocated,
--         expires_in_ms, ends_in_ms, first_minute, last_minute, starts_in_ms, overdraft, consumed and returned as the
--         region last reported them, 1 if the quota is in this period now or 0
-- Gives {'fenced'} | {'lost', quota key} | {'settled', 1 if a batch was dropped, for each lease the units that may
--       newly be spent …}
--
-- Totals only move forward, so a late or doubled reply does no harm. Durations count from before the request was
-- sent. A reply to an older epoch acknowledges evidence and admits nothing: of it only the totals that were given are
-- heard, so that all of it can be given back.
--
-- Which period a quota is in is for the coordinator to say: its period may have become another, which began earlier.
-- `lost`: the store has no lease although one was used or reported here. It has forgotten data, and so its epoch is
-- over; installed anew, the lease would admit the same units again. Nothing was changed then.

local VALUES = 14 -- for each lease

local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch', 'mono', 'last')
if fence[1] ~= ARGV[1] then return {'fenced'} end

local function at_of(i) return 6 + (i - 1) * VALUES end

-- A lease is never deleted. What shows that there was one: a report that the coordinator booked, something that is yet
-- to be reported, units that are held.
local function is_lost(i)
  local at, key = at_of(i), 2 * i + 2
  if redis.call('EXISTS', KEYS[key]) == 1 then return false end
  return tonumber(ARGV[at + 11]) + tonumber(ARGV[at + 12]) > 0 or redis.call('SISMEMBER', KEYS[3], ARGV[at]) == 1
    or redis.call('EXISTS', KEYS[key + 1]) == 1
end

if fence[2] == ARGV[2] then
  for i = 1, tonumber(ARGV[5]) do
    if is_lost(i) then return {'lost', ARGV[at_of(i)]} end
  end
end

local dropped = 0
if ARGV[3] ~= '0' and redis.call('HGET', KEYS[2], 'frozen_seq') == ARGV[3] then
  redis.call('HDEL', KEYS[2], 'frozen', 'frozen_seq')
  redis.call('HSET', KEYS[2], 'seq', ARGV[3])
  dropped = 1
end
local answer = {'settled', dropped}
local function whole(number) return string.format('%.0f', number) end

if fence[2] ~= ARGV[2] then
  local function hear(key, prefix, at)
    local f = redis.call('HMGET', key, prefix .. 'period', prefix .. 'granted', prefix .. 'overage')
    if f[1] ~= ARGV[at + 1] then return end
    redis.call('HSET', key, prefix .. 'granted', whole(math.max(tonumber(f[2]), tonumber(ARGV[at + 2]))),
      prefix .. 'overage', whole(math.max(tonumber(f[3] or 0), tonumber(ARGV[at + 3]))))
  end
  for i = 1, tonumber(ARGV[5]) do
    hear(KEYS[2 * i + 2], '', at_of(i))
    hear(KEYS[2 * i + 2], 'next:', at_of(i))
  end
  return answer
end

local sent = tonumber(ARGV[4])
local mono = require('parts/clock')(fence[3], fence[4])
local cut_off = require('parts/partition')
cut_off.forget()
local periods, over = require('parts/period_change'), require('parts/ended_period')

-- Another reply came in between. This one may still raise totals, but begins no lease: what it says was used is out of
-- date.
local is_late = tonumber(ARGV[3]) < tonumber(redis.call('HGET', KEYS[2], 'seq') or 0)

-- Of a period that is over here nothing is spent: what is granted to it late goes back as well. It is forgotten when
-- the coordinator has booked it as it is, and says itself that the period has ended, so it grants no more of it; and no
-- hold of it can be told of any more.
local function settle_over(key, quota, period, granted, overage, has_ended)
  local was = over.read(key, period)
  local was_given, spent = was.granted + was.overage, was.consumed + was.returned + was.held
  granted, overage = math.max(granted, was.granted), math.max(overage, was.overage)
  if granted + overage == was_given then
    local is_booked = dropped == 1 and was.told == tonumber(ARGV[3])
    if is_booked and has_ended and was.holds == 0 then
      redis.call('HDEL', key, 'was:' .. period, 'told:' .. period)
    end
    return
  end
  was.returned = was.returned + math.max(0, granted + overage - spent) - math.max(0, was_given - spent)
  was.granted, was.overage, was.told = granted, overage, 0
  over.write(key, period, was)
  redis.call('SADD', KEYS[3], quota)
end

-- Of what was overdrawn, only what no total covers is still owed: the rest was granted since, or had been, or is
-- overage. What is set aside counts as well, until it is known what becomes of it.
local function pay_back(key)
  local f = redis.call('HMGET', key, 'owed', 'granted', 'overage', 'consumed', 'returned', 'held')
  local owed = tonumber(f[1] or 0)
  if owed == 0 then return end
  local uncovered = tonumber(f[4] or 0) + tonumber(f[5] or 0) + tonumber(f[6] or 0) - tonumber(f[2]) - tonumber(f[3])
  redis.call('HSET', key, 'owed', whole(math.max(0, math.min(owed, uncovered))))
end

-- What is newly granted to the fields of a lease: the current one's, or those of the one that waits.
local function write(key, prefix, at)
  local f = redis.call('HMGET', key, prefix .. 'granted', prefix .. 'overage', prefix .. 'expires')
  local granted, overage = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local more = math.max(0, granted - tonumber(f[1] or 0))
  if not f[1] and redis.call('HEXISTS', key, 'told:' .. ARGV[at + 1]) == 0 then
    redis.call('HSET', key, 'told:' .. ARGV[at + 1], '0 ' .. ARGV[3])
  end
  redis.call('HSET', key, prefix .. 'period', ARGV[at + 1],
    prefix .. 'granted', whole(math.max(granted, tonumber(f[1] or 0))),
    prefix .. 'overage', whole(math.max(overage, tonumber(f[2] or 0))), prefix .. 'unallocated', ARGV[at + 4],
    prefix .. 'expires', whole(math.max(tonumber(f[3] or 0), sent + ARGV[at + 5] * 1000)),
    prefix .. 'ends', whole(sent + ARGV[at + 6] * 1000),
    prefix .. 'first_minute', ARGV[at + 7], prefix .. 'last_minute', ARGV[at + 8],
    prefix .. 'overdraft', ARGV[at + 10])
  if prefix == '' then pay_back(key) end
  if more > 0 then redis.call('HSET', key, prefix .. 'last_grant', whole(more)) end
  return more
end

-- A lease of a newer period waits beside the current one until it starts; that may be at once.
local function install_next(key, quota, at, waiting, waiting_first)
  local period = ARGV[at + 1]
  if waiting and waiting ~= period then
    if tonumber(ARGV[at + 7]) > tonumber(waiting_first) then periods.take_over(key, quota, KEYS[3], math.huge)
    else periods.displace(key, quota, KEYS[3]) end
  end
  local more = write(key, 'next:', at)
  -- Each estimate is too early by what its request took on the way: so the latest is the nearest.
  local starts = ARGV[at + 9] == '0' and sent
    or math.max(sent + ARGV[at + 9] * 1000, tonumber(redis.call('HGET', key, 'next:starts') or 0))
  redis.call('HSET', key, 'next:starts', whole(starts))
  periods.take_over(key, quota, KEYS[3], mono)
  return redis.call('HGET', key, 'period') == period and more or 0
end

-- A grant that cannot be spent here, of a period that this store has no record of: all that is left of it goes back.
local function give_back_unknown(key, quota, at)
  local was = {granted = tonumber(ARGV[at + 2]), overage = tonumber(ARGV[at + 3]), consumed = tonumber(ARGV[at + 11]),
    returned = tonumber(ARGV[at + 12]), told = 0, held = 0, holds = 0, overdrawn = 0}
  local left = was.granted + was.overage - was.consumed - was.returned
  if left <= 0 then return end
  was.returned = was.returned + left
  over.write(key, ARGV[at + 1], was)
  redis.call('SADD', KEYS[3], quota)
end

-- Gives all that may be spent of it: none of it could be before.
local function make_current(key, quota, at)
  local used = {consumed = tonumber(ARGV[at + 11]), returned = tonumber(ARGV[at + 12])}
  periods.switch_to(key, quota, KEYS[3], ARGV[at + 1], used)
  write(key, '', at)
  local f = redis.call('HMGET', key, 'granted', 'overage', 'consumed', 'returned', 'held')
  return math.max(0, f[1] + f[2] - f[3] - f[4] - f[5])
end

-- What waits begins with totals of zero. So a lease must not wait that is unknown here and was used: its totals are
-- booked and forgotten by now, although this reply may be from before its period ended.
local function may_wait(at, f, is_known)
  if is_known then return true end
  local has_ended, was_used = ARGV[at + 6] == '0', tonumber(ARGV[at + 11]) + tonumber(ARGV[at + 12]) > 0
  return not is_late and not has_ended and not was_used
    and not (f[1] and tonumber(ARGV[at + 7]) < tonumber(f[2] or 0))
end

local function install(key, quota, at)
  periods.take_over(key, quota, KEYS[3], mono)
  local period, is_current = ARGV[at + 1], ARGV[at + 13] == '1'
  local f = redis.call('HMGET', key, 'period', 'first_minute', 'next:period', 'next:first_minute', 'was:' .. period)
  if f[1] == period then return write(key, '', at) end
  if is_current and not is_late then return make_current(key, quota, at) end
  if f[5] then
    settle_over(key, quota, period, tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]), ARGV[at + 6] == '0')
  elseif may_wait(at, f, f[3] == period) then
    return install_next(key, quota, at, f[3], f[4])
  elseif not is_late then give_back_unknown(key, quota, at) end
  return 0
end

for i = 1, tonumber(ARGV[5]) do answer[#answer + 1] = install(KEYS[2 * i + 2], ARGV[at_of(i)], at_of(i)) end
return answer
