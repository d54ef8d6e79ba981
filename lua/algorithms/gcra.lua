-- The generic cell rate algorithm: a rate and a burst, kept as a time instead of a level.
--
-- State    the theoretical arrival time (parts/arrival). It expires when it has passed.
-- KEYS[1]  the packed state (parts/share)
-- ARGV[1]  rate_micro of the base share
-- ARGV[2]  burst of the base share
-- Returns  the algorithm. It admits what a token bucket of the same rate and burst admits, without any delay.

local arrival = require('parts/arrival')

local function tell(state, taken)
  local limit, remaining, reset_ms, there, rate_micro = arrival.tell(state, taken)
  return limit, remaining, reset_ms, there, rate_micro
end

return {keys = arrival.keys, arguments = arrival.arguments, look = arrival.look, refuse = arrival.refuse,
  take = arrival.take, keep = arrival.keep, tell = tell}
