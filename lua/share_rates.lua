-- Install shares of rates that the coordinator gave.
--
-- KEYS[1]  fence
-- then, for each rate:
-- KEYS     its state
-- ARGV[1]  fingerprint
-- ARGV[2]  epoch
-- ARGV[3]  mono when the shares were requested
-- then, for each rate:
-- ARGV     rate_micro of the base share
-- ARGV     burst of the base share
-- ARGV     the share's number
-- ARGV     rate_micro
-- ARGV     after_micro
-- ARGV     expires_in_ms
-- Returns  {'fenced'} | {'shared', how many were new}
--
-- Only a newer share is installed, so a duplicate or reordered reply does no harm. A reply that took longer than five
-- seconds is dropped: the coordinator relies on a share being forgotten forty seconds after it was requested.

local clock, shares = require('parts/clock'), require('parts/share')
local LATEST_US, KEPT_US = 5000000, 40000000

return function()
  local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch', 'mono', 'last')
  if fence[1] ~= ARGV[1] or fence[2] ~= ARGV[2] then return {'fenced'} end
  local mono, sent = clock.read(fence[3], fence[4]), tonumber(ARGV[3])
  if mono - sent > LATEST_US then return {'shared', 0} end

  local new = 0
  for i = 2, #KEYS do
    local at = 4 + 6 * (i - 2)
    local state = shares.read(KEYS[i], tonumber(ARGV[at]), tonumber(ARGV[at + 1]))
    local number = tonumber(ARGV[at + 2])
    if number > (state.share and state.share.number or 0) then
      shares.install(KEYS[i], state, {number = number, rate_micro = tonumber(ARGV[at + 3]),
        ends = sent + ARGV[at + 5] * 1000, after_micro = tonumber(ARGV[at + 4]), kept = sent + KEPT_US})
      new = new + 1
    end
  end
  return {'shared', new}
end
