-- Decide one request against all policies that match it: all are consumed, or none is.
--
-- KEYS  1            the fence
--       2            the operation's record (given, but not used, when there is no operation_id)
--       then, for each policy in turn:
--         allowance  its lease, its usage lines, its lane's dirty set
--         rate       its bucket
-- ARGV  1 fingerprint   2 epoch   3 mode: enforce | peek | adjust
--       4 hash of the operation's body, or ''   5 how long the operation is remembered, ms   6 number of policies
--       then, for each policy in turn, six:
--         allowance  'allowance', cost, limit, quota key, dimensions (JSON), ''
--         rate       'rate', cost, rate_micro, burst, '', ''
-- Gives {'fenced'} | {'operation_conflict'} | {'decided' or 'replayed', allowed 0|1, policy, policy, …}
--       a policy is {allowed 0|1, reason or '', limit, remaining, reset_ms, retry_after_ms, available, last_grant}
--
-- Buckets count thousand-millionths of a unit: a refill of `rate_micro` of them each millisecond is a whole number.

local MAX_UNITS = 9007199254740991
local PARTS = 1000000000

local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch', 'mono', 'last')
if fence[1] ~= ARGV[1] or fence[2] ~= ARGV[2] then return {'fenced'} end

local mode, operation = ARGV[3], ARGV[4]
if operation ~= '' then
  local record = redis.call('GET', KEYS[2])
  if record then
    local kept = cmsgpack.unpack(record)
    if kept[1] ~= operation then return {'operation_conflict'} end
    kept[2][1] = 'replayed'
    return kept[2]
  end
end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local mono = tonumber(fence[3] or 0) + math.max(0, now - tonumber(fence[4] or now))
redis.call('HSET', KEYS[1], 'mono', string.format('%.0f', mono), 'last', string.format('%.0f', now))

local function ms_until(moment) return math.max(0, math.ceil((moment - mono) / 1000)) end
-- How long a bucket takes to gain so many parts. A region without a share gains none: ask again in a second.
local function ms_to_gain(parts, rate_micro) return rate_micro > 0 and math.ceil(parts / rate_micro) or 1000 end

-- What a request has taken of a key so far: two policies may share one, and each takes its own cost.
local states = {}

local function allowance(key, cost, limit)
  local state = states[key]
  if not state then
    local f = redis.call('HMGET', key, 'period', 'granted', 'overage', 'consumed', 'returned', 'held', 'expires',
      'ends', 'unallocated', 'first_minute', 'last_minute', 'last_grant')
    state = {period = f[1], consumed = tonumber(f[4] or 0), expires = tonumber(f[7] or 0), ends = tonumber(f[8] or 0),
      unallocated = tonumber(f[9] or 0), first = tonumber(f[10] or 0), last = tonumber(f[11] or 0),
      last_grant = tonumber(f[12] or 0)}
    local given, taken = tonumber(f[2] or 0) + tonumber(f[3] or 0), tonumber(f[5] or 0) + tonumber(f[6] or 0)
    state.available = given - taken - state.consumed
    state.untouched = math.max(0, state.available) + state.unallocated
    states[key] = state
  end
  local reason = ''
  if cost > limit and mode ~= 'adjust' or state.consumed + cost > MAX_UNITS then reason = 'cost_above_limit'
  elseif not state.period then reason = 'no_lease'
  elseif mono >= state.expires and mode ~= 'adjust' then reason = 'lease_expired'
  elseif cost > state.available and mode ~= 'adjust' then reason = 'lease_spent'
  else
    state.available = state.available - cost
    state.consumed = state.consumed + cost
  end
  local reset = ms_until(state.ends)
  local remaining = math.max(0, state.available) + state.unallocated
  local allowed, retry = reason == '' and 1 or 0, reason == '' and 0 or reset
  return {allowed, reason, limit, remaining, reset, retry, state.available, state.last_grant}, state.untouched
end

local function rate(key, cost, rate_micro, burst)
  local state = states[key]
  if not state then
    local f = redis.call('HMGET', key, 'parts', 'at', 'rate_micro', 'burst', 'until')
    -- A share that the coordinator gave holds until it runs out; then the safe share of the arguments does.
    if f[5] and mono < tonumber(f[5]) then rate_micro, burst = tonumber(f[3]), tonumber(f[4]) end
    local full = burst * PARTS
    local parts = math.min(full, tonumber(f[1] or full))
    -- Whole milliseconds only; the microseconds left over count the next time.
    local at = tonumber(f[2] or mono)
    local elapsed_ms = math.floor((mono - at) / 1000)
    if elapsed_ms * rate_micro >= full - parts then parts = full else parts = parts + elapsed_ms * rate_micro end
    state = {parts = parts, at = at + elapsed_ms * 1000, full = full, rate_micro = rate_micro, burst = burst,
      untouched = math.max(0, math.floor(parts / PARTS))}
    states[key] = state
  end
  local reason, retry = '', 0
  if cost > state.burst and mode ~= 'adjust' or cost * PARTS > MAX_UNITS then reason = 'cost_above_limit'
  elseif cost * PARTS > state.parts and mode ~= 'adjust' then
    reason = 'rate_exceeded'
    retry = ms_to_gain(cost * PARTS - state.parts, state.rate_micro)
  else
    state.parts = math.max(state.parts - cost * PARTS, -MAX_UNITS)
  end
  local reset = ms_to_gain(state.full - state.parts, state.rate_micro)
  local remaining = math.max(0, math.floor(state.parts / PARTS))
  return {reason == '' and 1 or 0, reason, state.burst, remaining, reset, retry, remaining, 0}, state.untouched
end

local answer, untouched = {'decided', 1}, {}
local key, at = 3, 7
for i = 1, tonumber(ARGV[6]) do
  local policy
  if ARGV[at] == 'allowance' then
    policy, untouched[i] = allowance(KEYS[key], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]))
    key = key + 3
  else
    policy, untouched[i] = rate(KEYS[key], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]))
    key = key + 1
  end
  if policy[1] == 0 then answer[2] = 0 end
  answer[#answer + 1] = policy
  at = at + 6
end

if answer[2] == 0 or mode == 'peek' then
  -- Nothing is consumed, so what remains is what there was.
  for i, units in ipairs(untouched) do answer[2 + i][4] = units end
  return answer
end

-- From here on nothing may fail: everything was checked above.
key, at = 3, 7
for _ = 1, tonumber(ARGV[6]) do
  if ARGV[at] == 'allowance' then
    local state, cost = states[KEYS[key]], tonumber(ARGV[at + 1])
    local minute = math.min(math.max(math.floor(now / 60000000), state.first), state.last)
    local line = state.period .. '|' .. string.format('%.0f', minute) .. '|' .. ARGV[at + 4]
    redis.call('HINCRBY', KEYS[key], 'consumed', ARGV[at + 1])
    if redis.call('HINCRBY', KEYS[key + 1], line, ARGV[at + 1]) == cost then
      redis.call('SADD', KEYS[key + 2], ARGV[at + 3])
    end
    key = key + 3
  else
    local state = states[KEYS[key]]
    redis.call('HSET', KEYS[key], 'parts', string.format('%.0f', state.parts), 'at', string.format('%.0f', state.at))
    -- A bucket that is full again says nothing that an absent one does not.
    local ttl_ms = ms_to_gain(state.full - state.parts, state.rate_micro) + 60000
    redis.call('PEXPIRE', KEYS[key], string.format('%.0f', ttl_ms))
    key = key + 1
  end
  at = at + 6
end

if operation ~= '' then
  redis.call('SET', KEYS[2], cmsgpack.pack({operation, answer}), 'PX', ARGV[5])
end
return answer
