-- Take in the coordinator's reply to an exchange: drop the batch that it acknowledges, install what it grants.
--
-- KEYS  1 the fence   2 the lane   3 its dirty set   then for each lease itself, its holds and what is due of them
-- ARGV  1 fingerprint   2 epoch   3 seq that was acknowledged, or 0   4 mono when the request was made
--       5 number of leases
--       then, for each lease, oldest period first, eleven: quota key, period, granted, overage, unallocated,
--         expires_in_ms, ends_in_ms, first_minute, last_minute, starts_in_ms, overdraft
-- Gives {'fenced'} | {'settled', 1 if a batch was dropped, for each lease the units that may newly be spent …}
--
-- Totals only move forward, so a late or doubled reply does no harm. Durations count from before the request was
-- sent. A reply to an older epoch acknowledges evidence and admits nothing: of it only the totals that were given are
-- heard, so that all of it can be given back.

local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch', 'mono', 'last')
if fence[1] ~= ARGV[1] then return {'fenced'} end

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
    hear(KEYS[3 * i + 1], '', 6 + (i - 1) * 11)
    hear(KEYS[3 * i + 1], 'next:', 6 + (i - 1) * 11)
  end
  return answer
end

local sent = tonumber(ARGV[4])
local mono = require('parts/clock')(fence[3], fence[4])
local cut_off = require('parts/cut_off')
cut_off.forget()
local periods, over = require('parts/take_over'), require('parts/was')

-- Of a period that is over here nothing is spent: what is granted to it late goes back as well. It is forgotten when
-- the coordinator has booked it as it is, and says itself that the period has ended, so it grants no more of it; and no
-- hold of it can be told of any more.
local function settle_over(key, quota, period, granted, overage, has_ended)
  local was = over.read(key, period)
  if not was then return end
  local was_given, spent = was.granted + was.overage, was.consumed + was.returned + was.held
  granted, overage = math.max(granted, was.granted), math.max(overage, was.overage)
  if granted + overage == was_given then
    local is_booked = dropped == 1 and was.told == tonumber(ARGV[3])
    if is_booked and has_ended and was.holds == 0 then redis.call('HDEL', key, 'was:' .. period) end
    return
  end
  was.returned = was.returned + math.max(0, granted + overage - spent) - math.max(0, was_given - spent)
  was.granted, was.overage, was.told = granted, overage, 0
  over.write(key, period, was)
  redis.call('SADD', KEYS[3], quota)
end

-- Of what was overdrawn, only what no total covers is still owed: the rest was granted since, or had been, or is overage.
-- What is set aside counts as well, until it is known what becomes of it.
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
local function install(key, quota, at)
  periods.take_over(key, quota, KEYS[3], mono)
  local period, first = ARGV[at + 1], tonumber(ARGV[at + 7])
  local f = redis.call('HMGET', key, 'period', 'first_minute', 'next:period', 'next:first_minute', 'was:' .. period)
  if f[1] == period then return write(key, '', at) end
  if f[5] or f[1] and first < tonumber(f[2] or 0) then
    settle_over(key, quota, period, tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]), ARGV[at + 6] == '0')
    return 0
  end
  if f[3] and f[3] ~= period then
    if first > tonumber(f[4]) then periods.take_over(key, quota, KEYS[3], math.huge)
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

-- What was set aside of a lease that is gone is gone with it: ended later, it would leave the new one below zero.
local function forget_holds_of_lost(key, holds, due)
  if redis.call('EXISTS', key) == 0 then redis.call('DEL', holds, due) end
end

local at = 6
for i = 1, tonumber(ARGV[5]) do
  local key = KEYS[3 * i + 1]
  forget_holds_of_lost(key, KEYS[3 * i + 2], KEYS[3 * i + 3])
  answer[#answer + 1] = install(key, ARGV[at], at)
  at = at + 11
end
return answer
