-- The algorithms of a call by name, each made once; `shadow:NAME` is NAME, decided and never enforced.
--
-- KEYS     none
-- ARGV     none
-- Returns  a function of the store's clock and of when the store last lost data, which returns a function of a name

return function(mono, now, data_lost_at)
  local one_of = require('algorithms/*')
  local known = {}
  return function(name)
    local algorithm = known[name]
    if not algorithm then
      local in_shadow = string.match(name, '^shadow:(.*)')
      algorithm = one_of(in_shadow or name, mono, now, data_lost_at)
      algorithm.is_shadow = in_shadow ~= nil
      known[name] = algorithm
    end
    return algorithm
  end
end
