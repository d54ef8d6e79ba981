-- The algorithms by name; `shadow:NAME` is NAME, decided and never enforced.
--
-- KEYS     none
-- ARGV     none
-- Returns  a table; a name without an algorithm is an error

local algorithms = {}

for name, algorithm in pairs(require('algorithms/*')) do
  local shadow = {is_shadow = true}
  for field, value in pairs(algorithm) do shadow[field] = value end
  algorithms[name], algorithms['shadow:' .. name] = algorithm, shadow
end

return algorithms
