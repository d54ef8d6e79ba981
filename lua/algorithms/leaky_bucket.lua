-- A leaky bucket that shapes: an admitted request gets a delay, so that work leaves evenly at the rate.
--
-- State    the theoretical arrival time (parts/arrival). It expires when it has passed.
-- KEYS[1]  the packed state (parts/share)
-- ARGV[1]  rate_micro of the base share
-- ARGV[2]  burst of the base share: how many units may wait at once
-- Returns  the algorithm. `delay_ms` is the time until the request's turn; a request that would wait behind more than
--          the burst is denied.

return require('parts/arrival')
