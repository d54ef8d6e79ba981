-- Install the coordinator's reply to an exchange: drop the batch that it acknowledges, and install what it grants.
--
-- KEYS[1]  fence
-- KEYS[2]  lane
-- KEYS[3]  dirty set of the lane
-- then, for each lease:
-- KEYS     lease
-- KEYS     holds
-- ARGV[1]  fingerprint
-- ARGV[2]  epoch
-- ARGV[3]  seq of the batch that is acknowledged; 0 for none
-- ARGV[4]  mono when the request was made
-- ARGV[5]  number of leases
-- then, for each lease, the oldest period first:
-- ARGV     +0 quota key
-- ARGV     +1 period
-- ARGV     +2 granted
-- ARGV     +3 overage
-- ARGV     +4 unallocated
-- ARGV     +5 expires_in_ms
-- ARGV     +6 ends_in_ms
-- ARGV     +7 first_minute
-- ARGV     +8 last_minute
-- ARGV     +9 starts_in_ms
-- ARGV     +10 overdraft
-- ARGV     +11 consumed, as the region last reported it
-- ARGV     +12 returned, as the region last reported it
-- ARGV     +13 1 if the quota is in this period now, else 0
-- ARGV     +14 report_within_ms
-- ARGV     +15 report_at: the consumed total at which to report at once; 0 for none
-- Flags    allow-oom: it frees memory, so a full store runs it as well
-- Returns  {'fenced'} | {'lost', quota key} | {'settled', 1 if a batch was dropped, for each lease the units that it
--          gained …}
--
-- Totals only move forward, so a late or duplicate reply does no harm. Durations count from before the request was
-- sent. A reply to an older epoch acknowledges its usage and admits nothing: what it says was granted is returned.
--
-- The coordinator decides which period a quota is in: it may be another one, which began earlier.
--
-- `lost`: the store has no lease although one was used or reported here. It has lost data, so its epoch is over;
-- installed anew, the lease would admit the same units again. Nothing has changed then.

local clock, partition, report_due = require('parts/clock'), require('parts/partition'), require('parts/report_due')
local periods, ended_periods = require('parts/period_change'), require('parts/ended_period')
local idle = require('parts/idle')

local VALUES = 16 -- arguments of a lease

-- Of this call: when the request was sent, whether the reply drops a batch, and whether another has overtaken it.
local sent, dropped, is_late

local function argument_of(i) return 6 + (i - 1) * VALUES end

-- A lease is never deleted. That there was one is shown by a report that the coordinator booked, by something that is
-- yet to be reported, or by units that are held.
local function is_lost(i)
  local at, key = argument_of(i), 2 * i + 2
  if redis.call('EXISTS', KEYS[key]) == 1 then return false end
  return tonumber(ARGV[at + 11]) + tonumber(ARGV[at + 12]) > 0 or redis.call('ZSCORE', KEYS[3], ARGV[at])
    or redis.call('EXISTS', KEYS[key + 1]) == 1
end

local function whole(number) return string.format('%.0f', number) end

local function raise_totals(key, prefix, at)
  local f = redis.call('HMGET', key, prefix .. 'granted', prefix .. 'overage')
  redis.call('HSET', key, prefix .. 'granted', whole(math.max(tonumber(f[1]), tonumber(ARGV[at + 2]))),
    prefix .. 'overage', whole(math.max(tonumber(f[2] or 0), tonumber(ARGV[at + 3]))))
end

-- Drop the batch that the reply acknowledges, if it is there. Return 1 if it was, else 0.
local function drop_batch()
  if ARGV[3] == '0' or redis.call('HGET', KEYS[2], 'frozen_seq') ~= ARGV[3] then return 0 end
  redis.call('HDEL', KEYS[2], 'frozen', 'frozen_seq', 'frozen_since')
  redis.call('HSET', KEYS[2], 'seq', ARGV[3])
  return 1
end

-- Settle a period that has ended here. Nothing of it is spent, so a late grant is returned as well. It is forgotten
-- when the coordinator has booked it as it is, and says that the period has ended, so it grants no more of it; and
-- when no hold of it can be committed any more.
local function settle_ended(key, quota, period, granted, overage, has_ended)
  local ended = ended_periods.read(key, period)
  local given_before, spent = ended.granted + ended.overage, ended.consumed + ended.returned + ended.held
  granted, overage = math.max(granted, ended.granted), math.max(overage, ended.overage)
  if granted + overage == given_before then
    local is_booked = dropped == 1 and ended.reported_seq == tonumber(ARGV[3])
    if is_booked and has_ended and ended.holds == 0 then
      redis.call('HDEL', key, 'ended:' .. period, 'reported:' .. period)
    end
    return
  end
  ended.returned = ended.returned + math.max(0, granted + overage - spent) - math.max(0, given_before - spent)
  ended.granted, ended.overage, ended.reported_seq = granted, overage, 0
  ended_periods.write(key, period, ended)
  report_due.report_at_once(quota, KEYS[3])
end

-- Of the overdrawn units, only those that no total covers are still owed: the rest was granted, or is overage. Held
-- units count as used until their hold ends.
local function reduce_owed(key)
  local f = redis.call('HMGET', key, 'owed', 'granted', 'overage', 'consumed', 'returned', 'held')
  local owed = tonumber(f[1] or 0)
  if owed == 0 then return end
  local uncovered = tonumber(f[4] or 0) + tonumber(f[5] or 0) + tonumber(f[6] or 0) - tonumber(f[2]) - tonumber(f[3])
  redis.call('HSET', key, 'owed', whole(math.max(0, math.min(owed, uncovered))))
end

-- Write a lease, the current one or the waiting one, and return the units that are newly granted.
local function write(key, prefix, at)
  local f = redis.call('HMGET', key, prefix .. 'granted', prefix .. 'overage', prefix .. 'expires')
  local granted, overage = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local more = math.max(0, granted - tonumber(f[1] or 0))
  if not f[1] and redis.call('HEXISTS', key, 'reported:' .. ARGV[at + 1]) == 0 then
    redis.call('HSET', key, 'reported:' .. ARGV[at + 1], '0 ' .. ARGV[3])
  end
  redis.call('HSET', key, prefix .. 'period', ARGV[at + 1],
    prefix .. 'granted', whole(math.max(granted, tonumber(f[1] or 0))),
    prefix .. 'overage', whole(math.max(overage, tonumber(f[2] or 0))), prefix .. 'unallocated', ARGV[at + 4],
    prefix .. 'expires', whole(math.max(tonumber(f[3] or 0), sent + ARGV[at + 5] * 1000)),
    prefix .. 'ends', whole(sent + ARGV[at + 6] * 1000),
    prefix .. 'first_minute', ARGV[at + 7], prefix .. 'last_minute', ARGV[at + 8],
    prefix .. 'overdraft', ARGV[at + 10],
    prefix .. 'report_within', ARGV[at + 14], prefix .. 'report_at', ARGV[at + 15])
  if prefix == '' then reduce_owed(key) end
  if more > 0 then redis.call('HSET', key, prefix .. 'last_grant', whole(more)) end
  return more
end

-- Install the lease of a newer period. It waits beside the current one until it starts, which may be at once.
local function install_next(key, quota, at, waiting, waiting_first)
  local period = ARGV[at + 1]
  if waiting and waiting ~= period then
    if tonumber(ARGV[at + 7]) > tonumber(waiting_first) then periods.take_over(key, quota, KEYS[3], math.huge)
    else periods.displace(key, quota, KEYS[3]) end
  end
  local more = write(key, 'next:', at)
  -- Each estimate is too early by the time that its request took, so the latest one is the best.
  local starts = ARGV[at + 9] == '0' and sent
    or math.max(sent + ARGV[at + 9] * 1000, tonumber(redis.call('HGET', key, 'next:starts') or 0))
  redis.call('HSET', key, 'next:starts', whole(starts))
  periods.take_over(key, quota, KEYS[3], clock.mono)
  return redis.call('HGET', key, 'period') == period and more or 0
end

-- Return a grant that cannot be spent here: all that is left of a period of which this store has no record.
local function return_unknown_grant(key, quota, at)
  local ended = {granted = tonumber(ARGV[at + 2]), overage = tonumber(ARGV[at + 3]), consumed = tonumber(ARGV[at + 11]),
    returned = tonumber(ARGV[at + 12]), reported_seq = 0, held = 0, holds = 0, overdrawn = 0}
  local left = ended.granted + ended.overage - ended.consumed - ended.returned
  if left <= 0 then return end
  ended.returned = ended.returned + left
  ended_periods.write(key, ARGV[at + 1], ended)
  report_due.report_at_once(quota, KEYS[3])
end

-- Return all that an older epoch's lease has left, except what is held: no script admits in that epoch any more. A
-- grant that was never installed here is returned with the batch that it answered, so by one reply alone. If something
-- else of its lease is here, the lease itself was lost, and it is not known what was spent of it.
local function return_rest(i)
  local at, key = argument_of(i), KEYS[2 * i + 2]
  local quota, period = ARGV[at], ARGV[at + 1]
  local f = redis.call('HMGET', key, 'period', 'next:period', 'ended:' .. period)
  local prefix = f[1] == period and '' or f[2] == period and 'next:'
  if prefix then
    raise_totals(key, prefix, at)
    idle.return_idle(key, quota, KEYS[3], prefix, 0)
  elseif f[3] then
    settle_ended(key, quota, period, tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]), ARGV[at + 6] == '0')
  elseif dropped == 1 and not is_lost(i) then
    return_unknown_grant(key, quota, at)
  end
end

-- Make a lease's period the current one, and return all that may be spent of it: none of it could be before.
local function make_current(key, quota, at)
  local used = {consumed = tonumber(ARGV[at + 11]), returned = tonumber(ARGV[at + 12])}
  periods.switch_to(key, quota, KEYS[3], ARGV[at + 1], used)
  write(key, '', at)
  local f = redis.call('HMGET', key, 'granted', 'overage', 'consumed', 'returned', 'held')
  return math.max(0, f[1] + f[2] - f[3] - f[4] - f[5])
end

-- A waiting lease begins with totals of zero. So a lease that is unknown here and was used must not wait: its totals
-- are booked and forgotten by now, although this reply may be from before its period ended.
local function may_wait(at, f, is_known)
  if is_known then return true end
  local has_ended, was_used = ARGV[at + 6] == '0', tonumber(ARGV[at + 11]) + tonumber(ARGV[at + 12]) > 0
  return not is_late and not has_ended and not was_used
    and not (f[1] and tonumber(ARGV[at + 7]) < tonumber(f[2] or 0))
end

local function install(key, quota, at)
  periods.take_over(key, quota, KEYS[3], clock.mono)
  local period, is_current = ARGV[at + 1], ARGV[at + 13] == '1'
  local f = redis.call('HMGET', key, 'period', 'first_minute', 'next:period', 'next:first_minute', 'ended:' .. period)
  if f[1] == period then return write(key, '', at) end
  if is_current and not is_late then return make_current(key, quota, at) end
  if f[5] then
    settle_ended(key, quota, period, tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]), ARGV[at + 6] == '0')
  elseif may_wait(at, f, f[3] == period) then
    return install_next(key, quota, at, f[3], f[4])
  elseif not is_late then return_unknown_grant(key, quota, at) end
  return 0
end

return function()
  local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch', 'mono', 'last')
  if fence[1] ~= ARGV[1] then return {'fenced'} end
  local is_current = fence[2] == ARGV[2]
  for i = 1, tonumber(ARGV[5]) do
    if is_current and is_lost(i) then return {'lost', ARGV[argument_of(i)]} end
  end

  dropped = drop_batch()
  local answer = {'settled', dropped}
  if not is_current then
    for i = 1, tonumber(ARGV[5]) do return_rest(i) end
    return answer
  end
  sent = tonumber(ARGV[4])
  clock.read(fence[3], fence[4])
  partition.forget()
  -- A late reply may still raise totals, but begins no lease: what it says was used is out of date.
  is_late = tonumber(ARGV[3]) < tonumber(redis.call('HGET', KEYS[2], 'seq') or 0)
  for i = 1, tonumber(ARGV[5]) do
    answer[#answer + 1] = install(KEYS[2 * i + 2], ARGV[argument_of(i)], argument_of(i))
  end
  return answer
end
