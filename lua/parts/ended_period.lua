-- What is kept of a period that is over here: its totals, until they are booked and no hold of it can be told of.
--
-- KEYS  none: the name of a lease is given
-- ARGV  none
-- Gives {read, write}, functions of a lease and a period; the numbers are a table, and nil where there are none
--
-- `told` is the seq of the batch that told of them as they are, 0: none yet. `held` and `holds` mean what they do in a
-- lease, and so does `overdrawn`. A release before may have written the first five or seven only.

local NAMES = {'granted', 'overage', 'consumed', 'returned', 'told', 'held', 'holds', 'overdrawn'}

local function read(lease, period)
  local text = redis.call('HGET', lease, 'was:' .. period)
  if not text then return nil end
  local was, i = {told = 0, held = 0, holds = 0, overdrawn = 0}, 0
  for number in string.gmatch(text, '%d+') do
    i = i + 1
    was[NAMES[i]] = tonumber(number)
  end
  return was
end

local function write(lease, period, was)
  local numbers = {}
  for i, name in ipairs(NAMES) do numbers[i] = string.format('%.0f', was[name]) end
  redis.call('HSET', lease, 'was:' .. period, table.concat(numbers, ' '))
end

return {read = read, write = write}
