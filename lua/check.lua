-- Decide requests, each against all policies that it meets: all of them consume their cost, or none does.
--
-- KEYS[1]  fence
-- then, for each request:
-- KEYS     the record of its operation, if it has one
-- then, for each of its policies:
-- KEYS     the keys of its algorithm
-- ARGV[1]  fingerprint
-- ARGV[2]  epoch
-- ARGV[3]  number of requests
-- then, for each request:
-- ARGV     mode: enforce | peek | hold | adjust | peek_adjust | hold_adjust | refund
-- ARGV     how many times it is decided; more than once only for `enforce` without an operation
-- ARGV     number of policies
-- ARGV     digest of the operation's body; '' without an operation
-- ARGV     only with an operation: how long it is remembered, ms
-- ARGV     only of a hold: its id
-- ARGV     only of a hold: its name
-- ARGV     only of a hold: its time to live, ms
-- then, for each of its policies:
-- ARGV     name of the algorithm
-- ARGV     cost; of a refund it is negative
-- ARGV     the arguments of the algorithm
-- Returns  {'fenced'}, or one string with, for each time that a request is decided:
--            outcome, 1 byte: 0 denied, 1 allowed, 2 replayed, 3 operation has another body, 4 error
--            after 4: length of the error's text, 2 bytes, and the text; after 3: nothing
--            of a hold that is not denied: expires_in_ms, 8 bytes; length of its id, 2 bytes; its id (replayed: the
--              first)
--            for each policy: reason of its denial, 1 byte (parts/reasons; 0: allowed), and seven integers of 8 bytes,
--              little-endian: limit, remaining, reset_ms, retry_after_ms, available, last_grant, delay_ms
--
-- A policy whose algorithm's name begins with `shadow:` is decided like any other, but its denial stops no request, and
-- takes nothing. Requests are decided one after the other, so both of two requests count on a key that they share. A
-- request that is decided several times reads its state once, and writes it once. Algorithms decide policies
-- (algorithms/NAME.lua, described in lua/README.md); this script knows none of them by name. A hold is decided as a
-- check is, but an algorithm that can `hold` sets units aside instead of consuming them. An adjustment reports work
-- that was done, so no limit binds it; one over several cells is peeked, then held, then spent. A refund is an
-- adjustment with negative costs: it returns units to rates, never above their limit. A request that fails (a
-- key of another type, a malformed value) fails alone; an error of the store itself (no memory, no disk) fails the
-- call.

local clock, algorithms, reasons = require('parts/clock'), require('parts/algorithms'), require('parts/reasons')
local number = require('parts/number')

local DENIED, ALLOWED, REPLAYED, ANOTHER_BODY, FAILED = '\0', '\1', '\2', '\3', '\4'
local POLICY, POLICY_BYTES = '<Bi8i8i8i8i8i8i8', 57

local IS_PEEK = {peek = true, peek_adjust = true}
local IS_HOLD = {hold = true, hold_adjust = true}
local IS_ADJUSTMENT = {adjust = true, peek_adjust = true, hold_adjust = true, refund = true}

local key, at -- where the next key and the next argument of this call are
local answers, answered = {}, 0 -- the texts of this call's answer, and how many there are: those behind are of another

-- The request that is decided now, and its policies. The next one overwrites all of their fields: new tables would cost
-- the store as much as the decision.
local request, policies = {}, {}

local function add_answer(text)
  answered = answered + 1
  answers[answered] = text
end

-- Read the policies of the request. Two of them may share a key: it is read once, and each takes its cost of it.
local function read_policies()
  local states = request.count > 1 and {}
  for i = 1, request.count do
    local policy, algorithm, state = policies[i], algorithms[ARGV[at]], states and states[KEYS[key]]
    if not policy then
      policy = {}
      policies[i] = policy
    end
    if not state then
      state = algorithm.look(key, at + 2)
      state.taken = 0
      if states then states[KEYS[key]] = state end
    end
    policy.algorithm, policy.state, policy.key, policy.at = algorithm, state, key, at + 2
    policy.cost, policy.units, policy.reason, policy.retry_ms = number(ARGV[at + 1]), nil, nil, nil
    key, at = key + algorithm.keys, at + 2 + algorithm.arguments
  end
end

local function skip_policies(count)
  for _ = 1, count do
    local algorithm = algorithms[ARGV[at]]
    key, at = key + algorithm.keys, at + 2 + algorithm.arguments
  end
end

-- Decide each policy, and return whether an enforced one denies. An algorithm without `keep` is for holds only.
local function decide(is_enforced, may_hold)
  local is_refused = false
  for i = 1, request.count do
    local policy = policies[i]
    local algorithm, state, cost = policy.algorithm, policy.state, policy.cost
    local reason, retry_ms = 'hold_needed', nil
    if algorithm.keep or may_hold then reason, retry_ms = algorithm.refuse(state, cost, is_enforced) end
    policy.reason, policy.retry_ms = reason, retry_ms
    if not reason then state.taken = state.taken + cost
    elseif not algorithm.is_shadow then is_refused = true end
  end
  return is_refused
end

-- Pack the decision of one policy. Where nothing is taken, `remaining` is what there was.
local function pack_policy(policy, is_taken)
  local reason, state = policy.reason, policy.state
  local limit, remaining, reset_ms, available, last_grant, delay_ms =
    policy.algorithm.tell(state, is_taken and state.taken or 0)
  return struct.pack(POLICY, reason and reasons[reason] or 0, limit, remaining, reset_ms, policy.retry_ms or 0,
    available or remaining, last_grant or 0, not reason and delay_ms or 0)
end

local function pack_policies(is_taken)
  if request.count == 1 then return pack_policy(policies[1], is_taken) end
  local packed = {}
  for i = 1, request.count do packed[i] = pack_policy(policies[i], is_taken) end
  return table.concat(packed)
end

-- A hold as the operation's record has it, and as the answer has it.
local function pack_hold_record(hold) return hold and struct.pack('<dI2', hold.due, #hold.id) .. hold.id or '' end
local function pack_hold(hold)
  if not hold then return '' end
  local left_ms = math.max(0, math.ceil((hold.due - clock.mono) / 1000))
  return struct.pack('<i8I2', left_ms, #hold.id) .. hold.id
end

-- Return the hold of a known operation, if it was a hold, and the packed decisions of its policies.
local function read_record(text, was_hold)
  if not was_hold then return nil, text end
  local due, length, after = struct.unpack('<dI2', text)
  return {due = due, id = string.sub(text, after, after + length - 1)}, string.sub(text, after + length)
end

local function read_request()
  local operation = ARGV[at + 3]
  request.mode, request.times, request.count = ARGV[at], number(ARGV[at + 1]), number(ARGV[at + 2])
  request.operation, request.record, request.remembered_ms, request.known, request.hold = operation, nil, nil, nil, nil
  at = at + 4
  if operation ~= '' then
    request.record, request.remembered_ms = KEYS[key], ARGV[at]
    request.known = redis.call('GET', request.record)
    key, at = key + 1, at + 1
  end
  if IS_HOLD[request.mode] then
    request.hold = {id = ARGV[at], name = ARGV[at + 1], due = clock.mono + ARGV[at + 2] * 1000}
    at = at + 3
  end
end

-- Set units aside for each policy that can hold. All parts of a hold run out together; a shadow may run out earlier.
local function set_aside(hold)
  local parts = 0
  for i = 1, request.count do
    local policy = policies[i]
    local shortens = policy.state.longest_us and not policy.algorithm.is_shadow
    if shortens then hold.due = math.min(hold.due, clock.mono + policy.state.longest_us) end
  end
  for i = 1, request.count do
    local policy = policies[i]
    local set_aside_units = policy.algorithm.hold
    if set_aside_units then parts = parts + 1 end
    if set_aside_units and not policy.reason then
      set_aside_units(policy.state, policy.key, policy.at, policy.cost, hold.name .. '/' .. parts, hold.due)
    end
  end
end

-- Take the cost in memory, for the next time to find. A policy that denies here is a shadow, and takes nothing.
local function take(hold)
  for i = 1, request.count do
    local policy = policies[i]
    local algorithm, state = policy.algorithm, policy.state
    local is_kept = not policy.reason and not (hold and algorithm.hold)
    if is_kept then policy.units = (policy.units or 0) + policy.cost end
    if is_kept and state.taken ~= 0 then
      algorithm.take(state)
      state.taken = 0
    end
  end
end

local function keep()
  for i = 1, request.count do
    local policy = policies[i]
    if policy.units then policy.algorithm.keep(policy.state, policy.key, policy.at, policy.units) end
  end
end

-- Answer a known operation, which takes nothing: with the decisions of then, or, if its policies have changed, with
-- their state now.
local function replay()
  local operation, count = request.operation, request.count
  if string.sub(request.known, 1, #operation) ~= operation then
    skip_policies(count)
    return ANOTHER_BODY
  end
  local hold, packed = read_record(string.sub(request.known, #operation + 1), request.hold)
  if #packed == count * POLICY_BYTES then
    skip_policies(count)
  else
    read_policies()
    decide(false, true)
    packed = pack_policies(false)
  end
  return REPLAYED .. pack_hold(hold) .. packed
end

local function remember(packed)
  local record = request.operation .. pack_hold_record(request.hold) .. packed
  redis.call('SET', request.record, record, 'PX', request.remembered_ms)
end

-- Decide the request once. Return its answer, and whether it took nothing.
local function decide_once(mode, hold)
  local is_refused = decide(not IS_ADJUSTMENT[mode], hold or IS_PEEK[mode])
  if is_refused then return DENIED .. pack_policies(false), true end
  if IS_PEEK[mode] then return ALLOWED .. pack_policies(false), true end
  -- From here on nothing may fail: everything was checked above.
  if hold then set_aside(hold) end
  local packed = pack_policies(true)
  take(hold)
  if request.record then remember(packed) end
  return hold and ALLOWED .. pack_hold(hold) .. packed or ALLOWED .. packed
end

-- Decide a request as often as asked. After a denial nothing is taken, so the remaining times have the same answer.
local function answer_request()
  read_request()
  if request.known then return add_answer(replay()) end
  read_policies()
  local mode, hold, times = request.mode, request.hold, request.times
  for i = 1, times do
    local answer, took_nothing = decide_once(mode, hold)
    if took_nothing then
      add_answer(times == 1 and answer or string.rep(answer, times - i + 1))
      break
    end
    add_answer(answer)
  end
  keep()
end

-- Skip a request that failed, wherever in it that was.
local function skip_request(first_key, first_at)
  local has_operation = ARGV[first_at + 3] ~= '' and 1 or 0
  local of_hold = IS_HOLD[ARGV[first_at]] and 3 or 0
  key, at = first_key + has_operation, first_at + 4 + has_operation + of_hold
  skip_policies(tonumber(ARGV[first_at + 2]))
end

local function failed(fault)
  local text = type(fault) == 'table' and fault.err or tostring(fault)
  local code = string.match(text, '^%-?(%u+) ')
  if code and code ~= 'ERR' and code ~= 'WRONGTYPE' then error(fault) end
  text = string.sub(text, 1, 1000)
  return FAILED .. struct.pack('<I2', #text) .. text
end

local left -- how many requests of this call are not answered
local first_key, first_at, first_answer -- of the request that is decided now

local function answer_requests()
  while left > 0 do
    first_key, first_at, first_answer = key, at, answered
    answer_request()
    left = left - 1
  end
end

return function()
  local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch', 'mono', 'last', 'data_lost_at')
  if fence[1] ~= ARGV[1] or fence[2] ~= ARGV[2] then return {'fenced'} end
  clock.read(fence[3], fence[4], fence[5])
  key, at, answered, left = 2, 4, 0, tonumber(ARGV[3])
  while left > 0 do
    local is_done, fault = pcall(answer_requests)
    if not is_done then -- the request fails alone, and the others are decided
      answered = first_answer
      add_answer(string.rep(failed(fault), tonumber(ARGV[first_at + 1])))
      skip_request(first_key, first_at)
      left = left - 1
    end
  end
  return table.concat(answers, '', 1, answered)
end
