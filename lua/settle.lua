-- Take in the coordinator's reply to an exchange: drop the batch that it acknowledges, install what it grants.
--
-- KEYS  1 the fence   2 the lane   3 its dirty set   then the leases, then the states of the rates
-- ARGV  1 fingerprint   2 epoch   3 seq that was acknowledged, or 0   4 mono when the request was made
--       5 number of leases   6 number of rates
--       then, for each lease, oldest period first, ten: quota key, period, granted, overage, unallocated,
--         expires_in_ms, ends_in_ms, first_minute, last_minute, starts_in_ms
--       then, for each rate, three: rate_micro, burst, expires_in_ms
-- Gives {'fenced'} | {'settled', 1 if a batch was dropped, units newly granted to each lease …}
--
-- Totals only move forward, so a late or doubled reply does no harm. Durations count from before the request was
-- sent. A reply to an older epoch acknowledges evidence and admits nothing: of it only the totals that were given are
-- heard, so that all of it can be given back.

local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch')
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
  for i = 1, tonumber(ARGV[5]) do
    local at = 7 + (i - 1) * 10
    local f = redis.call('HMGET', KEYS[3 + i], 'period', 'granted', 'overage')
    if f[1] == ARGV[at + 1] then
      redis.call('HSET', KEYS[3 + i], 'granted', whole(math.max(tonumber(f[2]), tonumber(ARGV[at + 2]))),
        'overage', whole(math.max(tonumber(f[3] or 0), tonumber(ARGV[at + 3]))))
    end
  end
  return answer
end

local sent = tonumber(ARGV[4])

-- A period is over here: what is left goes back, and its totals wait for their last report.
local function retire(key, quota, f)
  local granted, overage, consumed = tonumber(f.granted), tonumber(f.overage), tonumber(f.consumed)
  local returned = math.max(tonumber(f.returned), granted + overage - consumed - tonumber(f.held))
  redis.call('HSET', key, 'was:' .. f.period,
    whole(granted) .. ' ' .. whole(overage) .. ' ' .. whole(consumed) .. ' ' .. whole(returned))
  redis.call('SADD', KEYS[3], quota)
end

local function install(key, quota, period, granted, overage, at)
  local v = redis.call('HMGET', key, 'period', 'granted', 'overage', 'consumed', 'returned', 'held', 'expires',
    'first_minute')
  local f = {period = v[1], granted = v[2] or 0, overage = v[3] or 0, consumed = v[4] or 0, returned = v[5] or 0,
    held = v[6] or 0, expires = v[7] or 0, first_minute = v[8] or 0}
  local first = tonumber(ARGV[at + 7])
  if f.period and f.period ~= period then
    if first < tonumber(f.first_minute) then
      if dropped == 1 then redis.call('HDEL', key, 'was:' .. period) end
      return 0
    end
    retire(key, quota, f)
    redis.call('HSET', key, 'consumed', 0, 'returned', 0, 'held', 0)
    f.granted, f.overage, f.expires = 0, 0, 0
  end
  local more = math.max(0, granted - tonumber(f.granted))
  redis.call('HSET', key, 'period', period, 'granted', whole(math.max(granted, tonumber(f.granted))),
    'overage', whole(math.max(overage, tonumber(f.overage))), 'unallocated', ARGV[at + 4],
    'expires', whole(math.max(tonumber(f.expires), sent + ARGV[at + 5] * 1000)),
    'ends', whole(sent + ARGV[at + 6] * 1000),
    'first_minute', ARGV[at + 7], 'last_minute', ARGV[at + 8])
  if more > 0 then redis.call('HSET', key, 'last_grant', whole(more)) end
  return more
end

local share = require('parts/share')
local at = 7
for i = 1, tonumber(ARGV[5]) do
  -- A lease of a period that has not begun yet waits until it has.
  local more = 0
  if ARGV[at + 9] == '0' then
    more = install(KEYS[3 + i], ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]), at)
  end
  answer[#answer + 1] = more
  at = at + 10
end
for i = 1, tonumber(ARGV[6]) do
  local key = KEYS[3 + tonumber(ARGV[5]) + i]
  local rate_micro, burst, expires_in_ms = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  share.install(key, rate_micro, burst, sent + expires_in_ms * 1000, expires_in_ms)
  at = at + 3
end
return answer
