-- Decide requests against all policies that each meets: of one request all are consumed, or none is.
--
-- KEYS  1            the fence
--       then, for each request in turn: its operation's record if it names one; then, for each policy, its algorithm's
-- ARGV  1 fingerprint   2 epoch   3 number of requests
--       then, for each request in turn: mode (enforce | peek | hold, adjust | peek_adjust | hold_adjust), how many
--         times it is asked, number of policies, hash of the operation's body or ''; only with an operation: how long
--         it is remembered, ms; only of a hold: its id, its name, how long it lasts, ms. Asked more than once is only
--         what is enforced and has none
--         then, for each policy in turn: its algorithm's name, cost, the algorithm's own arguments
-- Gives {'fenced'} | one string: for each time that a request is asked its outcome (a byte: 0 denied, 1 allowed, 2
--       replayed, 3 another body had this operation, 4 it failed); after a 4 the error's length (two bytes) and text,
--       after a 3 nothing, else for each policy: why not (a byte, see parts/reasons; 0: allowed), then whole numbers
--       of eight bytes, the lowest first: limit, remaining, reset_ms, retry_after_ms, available, last_grant, delay_ms.
--       Of a hold that was not denied, before the policies: expires_in_ms (eight bytes), the length of its id (two),
--       its id; replayed, those of the first time
--
-- A policy whose algorithm's name begins with `shadow:` is decided like any other, but stops nobody, and where it would
-- refuse it takes nothing. Requests are decided one after the other, so a key that two of them share counts both; what
-- is asked several times is read once, and written once. How a policy decides is its algorithm's business:
-- algorithms/NAME.lua gives `look`, `refuse`, `tell`, `take` and `keep`, as lua/README.md says. This is the envelope,
-- and knows none of them by name. A hold is decided as a check is; but an algorithm that can `hold` sets units aside
-- where another consumes them. An adjustment tells of what has happened, and no limit binds it; one over several cells
-- is looked at, and set aside, before it is spent. A request that fails (a key of another type, a spoilt value) fails
-- alone; an error that tells of the store itself (no memory, no disk) is everybody's.

local DENIED, ALLOWED, REPLAYED, ANOTHER_BODY, FAILED = '\0', '\1', '\2', '\3', '\4'
local POLICY_BYTES = 57

local function is_peek(mode) return mode == 'peek' or mode == 'peek_adjust' end
local function is_hold(mode) return mode == 'hold' or mode == 'hold_adjust' end
local function is_adjustment(mode) return mode == 'adjust' or mode == 'peek_adjust' or mode == 'hold_adjust' end

local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch', 'mono', 'last', 'lost_at')
if fence[1] ~= ARGV[1] or fence[2] ~= ARGV[2] then return {'fenced'} end
local mono, now = require('parts/clock')(fence[3], fence[4])

local named = require('parts/algorithms')(mono, now, fence[5])
local key, at = 2, 4 -- where the next key and the next argument are

-- What each policy asks for. Two policies of a request may share a key: it is read once, and each takes its cost.
local function read_policies(count)
  local policies, states = {}, {}
  for i = 1, count do
    local algorithm, state = named(ARGV[at]), states[KEYS[key]]
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
    local algorithm = named(ARGV[at])
    key, at = key + algorithm.keys, at + 2 + algorithm.arguments
  end
end

-- Each policy's verdict; gives whether one that is enforced refuses. What has no `keep` is for holds.
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

-- One policy's part of the answer. Where nothing is consumed, what remains is what there was.
local function told(policy, is_taken)
  local limit, remaining, reset_ms, available, last_grant, delay_ms =
    policy.algorithm.tell(policy.state, is_taken and policy.state.taken or 0)
  local reason = policy.reason and require('parts/reasons')[policy.reason] or 0
  return struct.pack('<Bi8i8i8i8i8i8i8', reason, limit, remaining, reset_ms, policy.retry_ms or 0,
    available or remaining, last_grant or 0, not policy.reason and delay_ms or 0)
end

-- What is written down of a hold, and what is told of it.
local function record_of(hold) return hold and struct.pack('<dI2', hold.due, #hold.id) .. hold.id or '' end
local function head_of(hold)
  if not hold then return '' end
  local left_ms = math.max(0, math.ceil((hold.due - mono) / 1000))
  return struct.pack('<i8I2', left_ms, #hold.id) .. hold.id
end

-- The hold of an operation that is known, if it was one, and what was answered of its policies.
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

-- What is held of each policy that can hold. No part of a hold outlasts another; one in shadow may end first.
local function set_aside(policies, hold)
  local parts = 0
  for _, policy in ipairs(policies) do
    local shortens = policy.state.longest_us and not policy.algorithm.is_shadow
    if shortens then hold.due = math.min(hold.due, mono + policy.state.longest_us) end
  end
  for _, policy in ipairs(policies) do
    local set = policy.algorithm.hold
    if set then parts = parts + 1 end
    if set and not policy.reason then
      set(policy.state, policy.key, policy.at, policy.cost, hold.name .. '/' .. parts, hold.due)
    end
  end
end

-- In memory: what the next time finds. What refuses is in shadow, and takes nothing.
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

local function all_told(policies, is_taken)
  local parts = {}
  for i, policy in ipairs(policies) do parts[i] = told(policy, is_taken) end
  return table.concat(parts)
end

-- An operation that is known takes nothing. Its policies are told as they were then; but if they are others by now, as
-- they are.
local function replay(request)
  local operation, count = request.operation, request.count
  if string.sub(request.known, 1, #operation) ~= operation then
    skip_policies(count)
    return ANOTHER_BODY
  end
  local hold, said = read_record(string.sub(request.known, #operation + 1), request.hold)
  if #said == count * POLICY_BYTES then
    skip_policies(count)
  else
    local policies = read_policies(count)
    decide(policies, false, true)
    said = all_told(policies, false)
  end
  return REPLAYED .. head_of(hold) .. said
end

local function remember(request, said)
  local record = request.operation .. record_of(request.hold) .. said
  redis.call('SET', request.record, record, 'PX', request.remembered_ms)
end

-- All that are enforced agree, or nothing is taken: then the times that are left are answered the same.
local function answer_to(request)
  if request.known then return replay(request) end
  local mode, hold, answers = request.mode, request.hold, {}
  local policies = read_policies(request.count)
  for i = 1, request.times do
    local is_refused = decide(policies, not is_adjustment(mode), hold or is_peek(mode))
    if is_refused or is_peek(mode) then
      local said = (is_refused and DENIED or ALLOWED) .. all_told(policies, false)
      answers[i] = string.rep(said, request.times - i + 1)
      break
    end
    -- From here on nothing may fail: everything was checked above.
    if hold then set_aside(policies, hold) end
    local said = all_told(policies, true)
    take(policies, hold)
    if request.record then remember(request, said) end
    answers[i] = ALLOWED .. head_of(hold) .. said
  end
  keep(policies)
  return table.concat(answers)
end

-- Past a request that failed, wherever in it that was.
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
  local is_decided, said = pcall(decide_next)
  if not is_decided then
    said = string.rep(failed(said), tonumber(ARGV[first_at + 1]))
    skip_request(first_key, first_at)
  end
  answer[i] = said
end
return table.concat(answer)
