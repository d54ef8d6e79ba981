-- The generic cell rate algorithm: a rate and a burst, remembered as a time instead of a fill.
--
-- Keeps  the theoretical arrival time (parts/arrival). Forgotten when it has passed.
-- KEYS  1 the packed state (parts/share)
-- ARGV  1 rate_micro   2 burst: the safe share
-- Gives the algorithm. It admits what a token bucket of the same rate and burst does; nobody is told to wait.

local mono = ...
local algorithm = require('parts/arrival')(mono)
local tell = algorithm.tell

function algorithm.tell(state, taken)
  local limit, remaining, reset_ms, there, rate_micro = tell(state, taken)
  return limit, remaining, reset_ms, there, rate_micro
end

return algorithm
