-- Decide requests against all policies that each meets: of one request all are consumed, or none is.
--
-- KEYS  1            the fence
--       then, for each request in turn: its operation's record if it names one; then, for each policy, its algorithm's
-- ARGV  1 fingerprint   2 epoch   3 number of requests
--       then, for each request in turn: mode (enforce | peek | adjust), number of policies, hash of the operation's
--         body or ''; only with an operation: how long it is remembered, ms
--         then, for each policy in turn: its algorithm's name, cost, the algorithm's own arguments
-- Gives {'fenced'} | one string: for each request its outcome (a byte: 0 denied, 1 allowed, 2 replayed, 3 another
--       body had this operation, 4 it failed); after a 4 the error's length (two bytes) and text, after a 3 nothing,
--       else for each policy: why not (a byte, see parts/reasons; 0: allowed), then whole numbers of eight bytes, the
--       lowest first: limit, remaining, reset_ms, retry_after_ms, available, last_grant, delay_ms
--
-- Requests are decided one after the other, so a key that two of them share counts both. How a policy decides is its
-- algorithm's business: algorithms/NAME.lua gives `look`, `refuse`, `keep` and `tell`, as lua/README.md says. This is
-- the envelope, and knows none of them by name. A request that fails (a key of another type, a spoilt value) fails
-- alone; an error that tells of the store itself (no memory, no disk) is everybody's.

local DENIED, ALLOWED, REPLAYED, ANOTHER_BODY, FAILED = '\0', '\1', '\2', '\3', '\4'
local POLICY_BYTES = 57

local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch', 'mono', 'last')
if fence[1] ~= ARGV[1] or fence[2] ~= ARGV[2] then return {'fenced'} end
local mono, now = require('parts/clock')(fence[3], fence[4])

local named = require('algorithms/*')
local algorithms = {}
local key, at = 2, 4 -- where the next key and the next argument are
local answer = {}

-- What the next policy asks for. Two policies of a request may share a key: it is read once, and each takes its cost.
local function read_policy(states)
  local name, cost = ARGV[at], tonumber(ARGV[at + 1])
  local algorithm = algorithms[name]
  if not algorithm then
    algorithm = named(name, mono, now)
    algorithms[name] = algorithm
  end
  local state = states[KEYS[key]]
  if not state then
    state = algorithm.look(key, at + 2)
    state.taken = 0
    states[KEYS[key]] = state
  end
  local policy = {algorithm = algorithm, state = state, key = key, at = at + 2, cost = cost}
  key, at = key + algorithm.keys, at + 2 + algorithm.arguments
  return policy
end

local function skip_policies(count)
  for _ = 1, count do
    local algorithm = named(ARGV[at], mono, now)
    key, at = key + algorithm.keys, at + 2 + algorithm.arguments
  end
end

-- Each policy's verdict; gives the policies, and whether one of them refuses.
local function decide(count, mode)
  local policies, states, refused = {}, {}, false
  for i = 1, count do
    local policy = read_policy(states)
    policy.reason, policy.retry_ms = policy.algorithm.refuse(policy.state, policy.cost, mode ~= 'adjust')
    if policy.reason then refused = true else policy.state.taken = policy.state.taken + policy.cost end
    policies[i] = policy
  end
  return policies, refused
end

-- One policy's part of the answer. Where nothing is consumed, what remains is what there was.
local function told(policy, is_taken)
  local limit, remaining, reset_ms, available, last_grant, delay_ms =
    policy.algorithm.tell(policy.state, is_taken and policy.state.taken or 0)
  local reason = policy.reason and require('parts/reasons')[policy.reason] or 0
  return struct.pack('<Bi8i8i8i8i8i8i8', reason, limit, remaining, reset_ms, policy.retry_ms or 0,
    available or remaining, last_grant or 0, not policy.reason and delay_ms or 0)
end

-- What was answered to an operation, as it was then; nil where it has to be told anew: its policies are others by now.
local function replayed(known, operation, count)
  if string.sub(known, 1, #operation) ~= operation then return ANOTHER_BODY end
  if #known == #operation + count * POLICY_BYTES then return REPLAYED .. string.sub(known, #operation + 1) end
end

local function decide_next()
  local mode, count, operation = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2]
  at = at + 3
  local record, remembered_ms, known
  if operation ~= '' then
    record, remembered_ms = KEYS[key], ARGV[at]
    key, at = key + 1, at + 1
    known = redis.call('GET', record)
  end
  local said = known and replayed(known, operation, count)
  if said then
    skip_policies(count)
    return said
  end
  local policies, refused = decide(count, known and 'adjust' or mode)
  local is_taken = not known and not refused and mode ~= 'peek'
  -- From here on nothing may fail: everything was checked above.
  local parts = {}
  for i = 1, count do
    local policy = policies[i]
    if is_taken then policy.algorithm.keep(policy.state, policy.key, policy.at, policy.cost) end
    parts[i] = told(policy, is_taken)
  end
  said = table.concat(parts)
  if record and is_taken then
    redis.call('SET', record, operation .. said, 'PX', remembered_ms)
  end
  return (known and REPLAYED or refused and DENIED or ALLOWED) .. said
end

-- Past a request that failed, wherever in it that was.
local function skip_request(first_key, first_at)
  local has_operation = ARGV[first_at + 2] ~= '' and 1 or 0
  key, at = first_key + has_operation, first_at + 3 + has_operation
  skip_policies(tonumber(ARGV[first_at + 1]))
end

local function failed(fault)
  local text = type(fault) == 'table' and fault.err or tostring(fault)
  local code = string.match(text, '^%-?(%u+) ')
  if code and code ~= 'ERR' and code ~= 'WRONGTYPE' then error(fault) end
  text = string.sub(text, 1, 1000)
  return FAILED .. struct.pack('<I2', #text) .. text
end

for i = 1, tonumber(ARGV[3]) do
  local first_key, first_at = key, at
  local is_decided, said = pcall(decide_next)
  if not is_decided then
    said = failed(said)
    skip_request(first_key, first_at)
  end
  answer[i] = said
end
return table.concat(answer)
