-- Take in the shares of rates that the coordinator gave.
--
-- KEYS  1 the fence   then the states of the rates
-- ARGV  1 fingerprint   2 epoch   3 mono when they were asked for
--       then, for each rate in turn: rate_micro and burst of the safe share, the share's number, rate_micro,
--         after_micro, expires_in_ms
-- Gives {'fenced'} | {'shared', how many were new}
--
-- Only a newer share is heard, so a doubled or reordered reply does no harm; and none of a reply that took longer than
-- five seconds, for the coordinator counts on it that a share is forgotten forty seconds after it was asked for.

local LATEST_US, KEPT_US = 5000000, 40000000

local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch', 'mono', 'last')
if fence[1] ~= ARGV[1] or fence[2] ~= ARGV[2] then return {'fenced'} end
local mono, sent = require('parts/clock')(fence[3], fence[4]), tonumber(ARGV[3])
if mono - sent > LATEST_US then return {'shared', 0} end
local shares = require('parts/share')

local new = 0
for i = 2, #KEYS do
  local at = 4 + 6 * (i - 2)
  local state = shares.read(KEYS[i], tonumber(ARGV[at]), tonumber(ARGV[at + 1]), mono)
  local number = tonumber(ARGV[at + 2])
  if number > (state.share and state.share.number or 0) then
    shares.give(KEYS[i], state, {number = number, rate_micro = tonumber(ARGV[at + 3]),
      ends = sent + ARGV[at + 5] * 1000, after_micro = tonumber(ARGV[at + 4]), kept = sent + KEPT_US})
    new = new + 1
  end
end
return {'shared', new}
