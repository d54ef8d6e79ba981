-- A number from its text, as an argument has it. The same few come again and again, and to read one costs the store as
-- much as three lookups, so they are kept.
--
-- KEYS     none
-- ARGV     none
-- Returns  a function of a text

local MAX_KEPT = 256
local numbers, count = {}, 0

return function(text)
  local number = numbers[text]
  if number then return number end
  number = tonumber(text)
  if not number then return nil end
  if count == MAX_KEPT then numbers, count = {}, 0 end
  numbers[text], count = number, count + 1
  return number
end
