-- Apply an action to a hold: commit, spend, release, extend, or look.
--
-- KEYS[1]  fence
-- KEYS[2]  epochs of this store
-- then, for each part of the hold:
-- KEYS     the keys of its algorithm
-- ARGV[1]  fingerprint
-- ARGV[2]  epoch of the hold
-- ARGV[3]  lanes of that epoch
-- ARGV[4]  the hold's name
-- ARGV[5]  commit | spend | release | extend | look
-- ARGV[6]  ms to extend by
-- ARGV[7]  number of parts
-- then, for each part:
-- ARGV     name of the algorithm
-- ARGV     units to commit; -1: all that the part has set aside
-- ARGV     the arguments of the algorithm
-- Returns  {'fenced'} | {'unknown'} | {done | ended | too_many | not_extended, state, units, committed, expires_in_ms,
--          then, for each part: units, committed (0 where it is forgotten)}
--
-- Work is booked on the lease that it was set aside of, whichever epoch the store has now. So only the fingerprint is
-- compared, and an older epoch becomes known again, for it has something to report. All parts of a hold end together.
-- MAY_BECOME is the transition table; a transition that is not in it is refused. A part that is no accounting
-- (`is_passing`) may be forgotten while others are known. `spend` commits to each part what it has set aside, for a
-- check over several cells: a part that ran out cannot be spent any more, for the check has not been answered yet. A
-- shadow part follows where it can, and decides nothing; a hold of shadow parts only is `nothing_held`.

local clock, algorithms = require('parts/clock'), require('parts/algorithms')

local MAY_BECOME = {
  open = {commit = 'committed', spend = 'committed', release = 'released', extend = 'open', look = 'open'},
  lapsed = {commit = 'committed', release = 'released', look = 'lapsed'},
  charged = {commit = 'committed', release = 'charged', look = 'charged'},
  committed = {commit = 'committed', spend = 'committed', look = 'committed'},
  released = {release = 'released', look = 'released'},
}

local all = {} -- the parts of this call's hold, in the order of its policies; false: unknown

-- The units that the action commits to a part.
local function amount_of(part, action, units)
  if action == 'spend' or action == 'commit' and units < 0 then return part.units end
  return action == 'commit' and units or 0
end

-- Find the parts of the hold. Return those that are enforced, those in shadow, and whether any is accounting; nil if
-- one is unknown that must be known.
local function find_parts(action)
  local parts, shadows, is_evidence, is_missing = {}, {}, false, false
  local key, at = 3, 8
  all = {}
  for i = 1, tonumber(ARGV[7]) do
    local algorithm = algorithms[ARGV[at]]
    local part = algorithm.find(key, at + 2, ARGV[4] .. '/' .. i)
    local among = algorithm.is_shadow and shadows or parts
    all[i] = part or false
    if part then
      part.algorithm, among[#among + 1] = algorithm, part
      part.amount = amount_of(part, action, tonumber(ARGV[at + 1]))
    elseif not algorithm.is_passing then return nil end
    is_missing = is_missing or not part and not algorithm.is_shadow
    is_evidence = is_evidence or not algorithm.is_passing
    key, at = key + algorithm.keys, at + 2 + algorithm.arguments
  end
  if #parts == 0 and is_missing then return nil end
  return parts, shadows, is_evidence
end

local function with_parts(answer)
  for _, part in ipairs(all) do
    answer[#answer + 1] = part and part.units or 0
    answer[#answer + 1] = part and part.committed or 0
  end
  return answer
end

-- Reply with the state of one part: a charged one if there is any, else the first allowance, else the first part.
local function reply(parts, outcome)
  local first = parts[1]
  if not first then return with_parts({outcome, 'nothing_held', 0, 0, 0}) end
  for _, part in ipairs(parts) do
    if first.algorithm.is_passing and not part.algorithm.is_passing then first = part end
    if part.state == 'charged' then
      first = part
      break
    end
  end
  local left_ms = first.state == 'open' and math.ceil((first.due - clock.mono) / 1000) or 0
  return with_parts({outcome, first.state, first.units, first.committed, left_ms})
end

-- Why a part does not permit the action; nil if it does. Parts may lie on one lease, which has to hold their `sum`.
local function refusal(part, action, sum)
  local is_another = part.state == 'committed' and action == 'commit' and part.committed ~= part.amount
  if not MAY_BECOME[part.state][action] or is_another then return 'ended' end
  if action == 'commit' and part.state ~= 'committed' and sum > part.most then return 'too_many' end
  local may_extend = action ~= 'extend' or not part.algorithm.may_extend or part.algorithm.may_extend(part)
  if not may_extend then return 'not_extended' end
end

local function follow(part, action, due)
  local becomes = MAY_BECOME[part.state][action]
  if not becomes then return end -- in shadow
  if action == 'extend' then part.algorithm.extend(part, due)
  elseif becomes ~= part.state then part.algorithm.finish(part, becomes, part.amount) end
end

return function()
  local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch', 'mono', 'last', 'data_lost_at')
  if fence[1] ~= ARGV[1] then return {'fenced'} end
  local mono = clock.read(fence[3], fence[4], fence[5])
  local action = ARGV[5]
  local parts, shadows, is_evidence = find_parts(action)
  if not parts then return {'unknown'} end

  local due, sum = mono + tonumber(ARGV[6]) * 1000, 0
  for _, part in ipairs(parts) do sum = sum + part.amount end
  for _, part in ipairs(parts) do
    local refused = refusal(part, action, sum)
    if refused then return reply(parts, refused) end
    due = math.min(due, mono + (part.longest_us or math.huge))
  end
  -- From here on nothing may fail: everything was checked above.
  for _, part in ipairs(parts) do follow(part, action, due) end
  for _, part in ipairs(shadows) do follow(part, action, due) end
  if is_evidence and fence[2] ~= ARGV[2] then redis.call('HSET', KEYS[2], ARGV[2], ARGV[3]) end
  return reply(parts, 'done')
end
