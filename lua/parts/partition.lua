-- Whether the region is partitioned from the coordinator, as its agents noted it in the fence.
--
-- KEYS[1]  fence
-- ARGV     none
-- Returns  {note, is_partitioned, forget}; the first two are functions of the store's clock
--
-- An agent whose call got no answer notes it, and an agent that gets an answer clears the note, so an agent that alone
-- is partitioned is soon contradicted. The region is partitioned when no agent got an answer for a while, as long as
-- one still tries: the note of an agent that has stopped means nothing later.

local PARTITIONED_AFTER_US, FORGOTTEN_US = 5 * 1000000, 30 * 1000000

local function read() return redis.call('HMGET', KEYS[1], 'coordinator_lost_since', 'coordinator_lost_at') end

local function is_old(at, mono) return not at or mono - tonumber(at) > FORGOTTEN_US end

local function note(mono)
  local f, now = read(), string.format('%.0f', mono)
  redis.call('HSET', KEYS[1], 'coordinator_lost_since', is_old(f[2], mono) and now or f[1], 'coordinator_lost_at', now)
end

local function is_partitioned(mono)
  local f = read()
  return not is_old(f[2], mono) and mono - tonumber(f[1]) >= PARTITIONED_AFTER_US
end

local function forget() redis.call('HDEL', KEYS[1], 'coordinator_lost_since', 'coordinator_lost_at') end

return {note = note, is_partitioned = is_partitioned, forget = forget}
