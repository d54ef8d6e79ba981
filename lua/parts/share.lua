-- How the state of a rate is packed: one short string, read and written in half the time that a hash takes.
--
-- KEYS  none
-- ARGV  none
-- Gives {look, keep, install}, functions of a key's name
--
-- The string is a layout's number (a byte, see LAYOUTS), then doubles: the share that the coordinator gave this region
-- (rate_micro, burst, and until when on the store's clock; 0: none yet), then what the algorithm remembers. Who finds
-- another layout than its own begins anew. It is forgotten when neither part says more than an absent key does.

local LAYOUTS = {none = 0, parts = 1, arrival = 2, fixed = 3, sliding = 4, log = 5}
local HEAD, HEAD_BYTES = '<Bddd', 25

local function unpacked(key)
  local packed = redis.call('GET', key)
  if not packed then return LAYOUTS.none, 0, 0, 0, '' end
  local layout, rate_micro, burst, share_until = struct.unpack(HEAD, packed)
  return layout, rate_micro, burst, share_until, string.sub(packed, HEAD_BYTES + 1)
end

local function write(key, layout, rate_micro, burst, share_until, remembered, ttl_ms)
  local packed = struct.pack(HEAD, layout, rate_micro, burst, share_until) .. remembered
  redis.call('SET', key, packed, 'PX', string.format('%.0f', math.max(1, ttl_ms)))
end

-- A new state: the share as long as it holds, else the safe share of the arguments, and what was remembered.
local function look(key, layout_name, rate_micro, burst, mono)
  local layout, share_rate, share_burst, share_until, remembered = unpacked(key)
  if layout ~= LAYOUTS[layout_name] then layout, remembered = LAYOUTS[layout_name], '' end
  if mono < share_until then rate_micro, burst = share_rate, share_burst end
  return {layout = layout, rate_micro = rate_micro, burst = burst, remembered = remembered, mono = mono,
    share_rate = share_rate, share_burst = share_burst, share_until = share_until}
end

local function keep(key, state, remembered, state_ms)
  local share_ms = math.ceil((state.share_until - state.mono) / 1000)
  local ttl_ms = math.max(state_ms + 1, share_ms)
  write(key, state.layout, state.share_rate, state.share_burst, state.share_until, remembered, ttl_ms)
end

local function install(key, rate_micro, burst, share_until, expires_in_ms)
  local layout, _, _, _, remembered = unpacked(key)
  write(key, layout, rate_micro, burst, share_until, remembered, math.max(redis.call('PTTL', key), expires_in_ms))
end

return {look = look, keep = keep, install = install}
