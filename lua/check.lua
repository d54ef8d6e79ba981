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
-- ARGV     mode: enforce | peek | hold | adjust | peek_adjust | hold_adjust
-- ARGV     how many times it is decided; more than once only for `enforce` without an operation
-- ARGV     number of policies
-- ARGV     digest of the operation's body; '' without an operation
-- ARGV     only with an operation: how long it is remembered, ms
-- ARGV     only of a hold: its id
-- ARGV     only of a hold: its name
-- ARGV     only of a hold: its time to live, ms
-- then, for each of its policies:
-- ARGV     name of the algorithm
-- ARGV     cost
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
-- that was done, so no limit binds it; one over several cells is peeked, then held, then spent. A request that fails (a
-- key of another type, a malformed value) fails alone; an error of the store itself (no memory, no disk) fails the
-- call.

local DENIED, ALLOWED, REPLAYED, ANOTHER_BODY, FAILED = '\0', '\1', '\2', '\3', '\4'
local POLICY_BYTES = 57

local function is_peek(mode) return mode == 'peek' or mode == 'peek_adjust' end
local function is_hold(mode) return mode == 'hold' or mode == 'hold_adjust' end
local function is_adjustment(mode) return mode == 'adjust' or mode == 'peek_adjust' or mode == 'hold_adjust' end

local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch', 'mono', 'last', 'data_lost_at')
if fence[1] ~= ARGV[1] or fence[2] ~= ARGV[2] then return {'fenced'} end
local mono, now = require('parts/clock')(fence[3], fence[4])

local algorithm_named = require('parts/algorithms')(mono, now, fence[5])
local key, at = 2, 4 -- where the next key and the next argument are

-- Read the policies of a request. Two of them may share a key: it is read once, and each takes its cost of it.
local function read_policies(count)
  local policies, states = {}, {}
  for i = 1, count do
    local algorithm, state = algorithm_named(ARGV[at]), states[KEYS[key]]
    if not state then
      state = algorithm.look(key, at + 2)
      state.taken = 0
      states[KEYS[key]] = state
    end
    policies[i] = {algorithm = algorithm, state = state, key = key, at = at + 2, cost = tonumber(ARGV[at + 1])}
    key, at = key + algorithm.keys, at + 2 + algorithm.arguments
  end
  return policies
end

local function skip_policies(count)
  for _ = 1, count do
    local algorithm = algorithm_named(ARGV[at])
    key, at = key + algorithm.keys, at + 2 + algorithm.arguments
  end
end

-- Decide each policy, and return whether an enforced one denies. An algorithm without `keep` is for holds only.
local function decide(policies, is_enforced, may_hold)
  local is_refused = false
  for _, policy in ipairs(policies) do
    local algorithm = policy.algorithm
    if algorithm.keep or may_hold then
      policy.reason, policy.retry_ms = algorithm.refuse(policy.state, policy.cost, is_enforced)
    else policy.reason = 'hold_needed' end
    if not policy.reason then policy.state.taken = policy.state.taken + policy.cost
    elseif not algorithm.is_shadow then is_refused = true end
  end
  return is_refused
end

-- Pack the decision of one policy. Where nothing is taken, `remaining` is what there was.
local function pack_policy(policy, is_taken)
  local limit, remaining, reset_ms, available, last_grant, delay_ms =
    policy.algorithm.tell(policy.state, is_taken and policy.state.taken or 0)
  local reason = policy.reason and require('parts/reasons')[policy.reason] or 0
  return struct.pack('<Bi8i8i8i8i8i8i8', reason, limit, remaining, reset_ms, policy.retry_ms or 0,
    available or remaining, last_grant or 0, not policy.reason and delay_ms or 0)
end

-- A hold as the operation's record has it, and as the answer has it.
local function pack_hold_record(hold) return hold and struct.pack('<dI2', hold.due, #hold.id) .. hold.id or '' end
local function pack_hold(hold)
  if not hold then return '' end
  local left_ms = math.max(0, math.ceil((hold.due - mono) / 1000))
  return struct.pack('<i8I2', left_ms, #hold.id) .. hold.id
end

-- Return the hold of a known operation, if it was a hold, and the packed decisions of its policies.
local function read_record(text, was_hold)
  if not was_hold then return nil, text end
  local due, length, after = struct.unpack('<dI2', text)
  return {due = due, id = string.sub(text, after, after + length - 1)}, string.sub(text, after + length)
end

local function read_request()
  local request = {mode = ARGV[at], times = tonumber(ARGV[at + 1]), count = tonumber(ARGV[at + 2]),
    operation = ARGV[at + 3]}
  at = at + 4
  if request.operation ~= '' then
    request.record, request.remembered_ms = KEYS[key], ARGV[at]
    request.known = redis.call('GET', request.record)
    key, at = key + 1, at + 1
  end
  if is_hold(request.mode) then
    request.hold = {id = ARGV[at], name = ARGV[at + 1], due = mono + ARGV[at + 2] * 1000}
    at = at + 3
  end
  return request
end

-- Set units aside for each policy that can hold. All parts of a hold run out together; a shadow may run out earlier.
local function set_aside(policies, hold)
  local parts = 0
  for _, policy in ipairs(policies) do
    local shortens = policy.state.longest_us and not policy.algorithm.is_shadow
    if shortens then hold.due = math.min(hold.due, mono + policy.state.longest_us) end
  end
  for _, policy in ipairs(policies) do
    local set_aside_units = policy.algorithm.hold
    if set_aside_units then parts = parts + 1 end
    if set_aside_units and not policy.reason then
      set_aside_units(policy.state, policy.key, policy.at, policy.cost, hold.name .. '/' .. parts, hold.due)
    end
  end
end

-- Take the cost in memory, for the next time to find. A policy that denies here is a shadow, and takes nothing.
local function take(policies, hold)
  for _, policy in ipairs(policies) do
    local algorithm, state = policy.algorithm, policy.state
    local is_kept = not policy.reason and not (hold and algorithm.hold)
    if is_kept then policy.units = (policy.units or 0) + policy.cost end
    if is_kept and state.taken ~= 0 then
      algorithm.take(state)
      state.taken = 0
    end
  end
end

local function keep(policies)
  for _, policy in ipairs(policies) do
    if policy.units then policy.algorithm.keep(policy.state, policy.key, policy.at, policy.units) end
  end
end

local function pack_policies(policies, is_taken)
  local parts = {}
  for i, policy in ipairs(policies) do parts[i] = pack_policy(policy, is_taken) end
  return table.concat(parts)
end

-- Answer a known operation, which takes nothing: with the decisions of then, or, if its policies have changed, with
-- their state now.
local function replay(request)
  local operation, count = request.operation, request.count
  if string.sub(request.known, 1, #operation) ~= operation then
    skip_policies(count)
    return ANOTHER_BODY
  end
  local hold, packed = read_record(string.sub(request.known, #operation + 1), request.hold)
  if #packed == count * POLICY_BYTES then
    skip_policies(count)
  else
    local policies = read_policies(count)
    decide(policies, false, true)
    packed = pack_policies(policies, false)
  end
  return REPLAYED .. pack_hold(hold) .. packed
end

local function remember(request, packed)
  local record = request.operation .. pack_hold_record(request.hold) .. packed
  redis.call('SET', request.record, record, 'PX', request.remembered_ms)
end

-- Decide a request as often as asked. After a denial nothing is taken, so the remaining times have the same answer.
local function answer_to(request)
  if request.known then return replay(request) end
  local mode, hold, answers = request.mode, request.hold, {}
  local policies = read_policies(request.count)
  for i = 1, request.times do
    local is_refused = decide(policies, not is_adjustment(mode), hold or is_peek(mode))
    if is_refused or is_peek(mode) then
      local packed = (is_refused and DENIED or ALLOWED) .. pack_policies(policies, false)
      answers[i] = string.rep(packed, request.times - i + 1)
      break
    end
    -- From here on nothing may fail: everything was checked above.
    if hold then set_aside(policies, hold) end
    local packed = pack_policies(policies, true)
    take(policies, hold)
    if request.record then remember(request, packed) end
    answers[i] = ALLOWED .. pack_hold(hold) .. packed
  end
  keep(policies)
  return table.concat(answers)
end

-- Skip a request that failed, wherever in it that was.
local function skip_request(first_key, first_at)
  local has_operation = ARGV[first_at + 3] ~= '' and 1 or 0
  local of_hold = is_hold(ARGV[first_at]) and 3 or 0
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

local function decide_next() return answer_to(read_request()) end

local answer = {}
for i = 1, tonumber(ARGV[3]) do
  local first_key, first_at = key, at
  local is_decided, packed = pcall(decide_next)
  if not is_decided then
    packed = string.rep(failed(packed), tonumber(ARGV[first_at + 1]))
    skip_request(first_key, first_at)
  end
  answer[i] = packed
end
return table.concat(answer)
