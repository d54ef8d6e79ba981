-- Install shares of slots that the coordinator gave.
--
-- KEYS[1]  fence
-- then, for each quota:
-- KEYS     the three keys of its slots (algorithms/concurrency)
-- ARGV[1]  fingerprint
-- ARGV[2]  epoch
-- ARGV[3]  mono when the shares were requested
-- then, for each quota:
-- ARGV     the share's number
-- ARGV     units
-- ARGV     after_units
-- ARGV     expires_in_ms
-- ARGV     slot_ttl_ms
-- Returns  {'fenced'} | {'shared', how many were new}
--
-- As in share_rates, only a newer share is installed, and no reply that took longer than five seconds.

local clock, slots = require('parts/clock'), require('algorithms/concurrency')
local LATEST_US = 5000000

return function()
  local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch', 'mono', 'last', 'data_lost_at')
  if fence[1] ~= ARGV[1] or fence[2] ~= ARGV[2] then return {'fenced'} end
  local mono = clock.read(fence[3], fence[4], fence[5])
  local sent = tonumber(ARGV[3])
  if mono - sent > LATEST_US then return {'shared', 0} end

  local new = 0
  for i = 0, (#KEYS - 1) / 3 - 1 do
    local at = 4 + 5 * i
    local share = {number = tonumber(ARGV[at]), units = tonumber(ARGV[at + 1]), after = tonumber(ARGV[at + 2]),
      ends = sent + ARGV[at + 3] * 1000, longest_us = ARGV[at + 4] * 1000}
    if slots.install(2 + 3 * i, share, sent) then new = new + 1 end
  end
  return {'shared', new}
end
