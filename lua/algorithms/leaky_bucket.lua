-- A leaky bucket that shapes: who is admitted is told how long to wait, so that work leaves evenly at the rate.
--
-- Keeps  the theoretical arrival time (parts/arrival). Forgotten when it has passed.
-- KEYS  1 the packed state (parts/share)
-- ARGV  1 rate_micro   2 burst: how many units may wait at once; the safe share
-- Gives the algorithm. `delay_ms` is the time until the request's turn; who would have to wait behind more than the
--       burst is denied.

local mono = ...
return require('parts/arrival')(mono)
