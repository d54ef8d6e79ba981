-- How the state of a rate is packed: one short string, read and written in half the time that a hash takes.
--
-- KEYS  none
-- ARGV  none
-- Gives {look, keep, install}, functions of a key's name
--
-- The string is a layout's number (a byte), then doubles: the share that the coordinator gave this region (rate_micro,
-- burst, and until when on the store's clock; 0: none yet), then what the algorithm remembers. It is forgotten when
-- neither part says more than an absent key does.

local LAYOUT, HEAD, HEAD_BYTES = 1, '<Bddd', 25

local function unpacked(key)
  local packed = redis.call('GET', key)
  if packed then
    local layout, rate_micro, burst, share_until = struct.unpack(HEAD, packed)
    if layout == LAYOUT then return rate_micro, burst, share_until, string.sub(packed, HEAD_BYTES + 1) end
  end
  return 0, 0, 0, ''
end

local function write(key, rate_micro, burst, share_until, remembered, ttl_ms)
  local packed = struct.pack(HEAD, LAYOUT, rate_micro, burst, share_until) .. remembered
  redis.call('SET', key, packed, 'PX', string.format('%.0f', math.max(1, ttl_ms)))
end

-- A new state: the share as long as it holds, else the safe share of the arguments, and what was remembered.
local function look(key, rate_micro, burst, mono)
  local share_rate, share_burst, share_until, remembered = unpacked(key)
  if mono < share_until then rate_micro, burst = share_rate, share_burst end
  return {rate_micro = rate_micro, burst = burst, remembered = remembered, mono = mono,
    share_rate = share_rate, share_burst = share_burst, share_until = share_until}
end

local function keep(key, state, remembered, ttl_ms)
  local share_ms = math.ceil((state.share_until - state.mono) / 1000)
  write(key, state.share_rate, state.share_burst, state.share_until, remembered, math.max(ttl_ms + 1, share_ms))
end

local function install(key, rate_micro, burst, share_until, expires_in_ms)
  local _, _, _, remembered = unpacked(key)
  write(key, rate_micro, burst, share_until, remembered, math.max(redis.call('PTTL', key), expires_in_ms))
end

return {look = look, keep = keep, install = install}
