-- Is the region cut off from the coordinator? What its agents know of it, in the fence.
--
-- KEYS  1 the fence
-- ARGV  none
-- Gives {note, is_so, forget}, functions of the store's clock, but for the last, which takes nothing
--
-- An agent whose call got no answer says so, and an agent that is answered takes it back: so one that is alone cut off
-- is soon contradicted by another. A region is cut off when no agent was answered for a while since; and as long as one
-- still tries, for what an agent said that is gone by now says nothing of today.

local CUT_OFF_US, FORGOTTEN_US = 5 * 1000000, 30 * 1000000

local function read() return redis.call('HMGET', KEYS[1], 'unheard_since', 'unheard_at') end

local function is_old(at, mono) return not at or mono - tonumber(at) > FORGOTTEN_US end

local function note(mono)
  local f, now = read(), string.format('%.0f', mono)
  redis.call('HSET', KEYS[1], 'unheard_since', is_old(f[2], mono) and now or f[1], 'unheard_at', now)
end

local function is_so(mono)
  local f = read()
  return not is_old(f[2], mono) and mono - tonumber(f[1]) >= CUT_OFF_US
end

local function forget() redis.call('HDEL', KEYS[1], 'unheard_since', 'unheard_at') end

return {note = note, is_so = is_so, forget = forget}
