-- What a lease keeps of a period that has ended: its totals, until they are booked and no hold of it can be committed.
--
-- KEYS     none: the name of a lease is an argument
-- ARGV     none
-- Returns  {read, write}, functions of a lease and a period; the totals are a table, or nil where there are none
--
-- `reported_seq` is the seq of the batch that reported the totals as they are; 0: none yet. `held`, `holds` and
-- `overdrawn` mean what they do in a lease. A release before may have written the first five or seven only.

local NAMES = {'granted', 'overage', 'consumed', 'returned', 'reported_seq', 'held', 'holds', 'overdrawn'}

local function read(lease, period)
  local text = redis.call('HGET', lease, 'ended:' .. period)
  if not text then return nil end
  local ended, i = {reported_seq = 0, held = 0, holds = 0, overdrawn = 0}, 0
  for number in string.gmatch(text, '%d+') do
    i = i + 1
    ended[NAMES[i]] = tonumber(number)
  end
  return ended
end

local function write(lease, period, ended)
  local numbers = {}
  for i, name in ipairs(NAMES) do numbers[i] = string.format('%.0f', ended[name]) end
  redis.call('HSET', lease, 'ended:' .. period, table.concat(numbers, ' '))
end

return {read = read, write = write}
