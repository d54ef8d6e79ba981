-- Stop first, then tell: what is given back is out of reach here before anyone hears of it.
--
-- KEYS  1 the fence   2 the lease   3 its lane's dirty set
-- ARGV  1 fingerprint   2 epoch   3 quota key   4 how much to keep
-- Gives the units given back, or -1 if fenced.
--
-- An older epoch admits nothing any more, so what is read here of it is final: it is told even if nothing is left.

local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch')
if fence[1] ~= ARGV[1] or not fence[2] then return -1 end
local f = redis.call('HMGET', KEYS[2], 'granted', 'overage', 'consumed', 'returned', 'held')
if not f[1] then return 0 end
local available = tonumber(f[1]) + tonumber(f[2] or 0) - tonumber(f[3] or 0) - tonumber(f[4] or 0) - tonumber(f[5] or 0)
local units = math.max(0, available - tonumber(ARGV[4]))
if units > 0 then redis.call('HINCRBY', KEYS[2], 'returned', string.format('%.0f', units)) end
if units > 0 or fence[2] ~= ARGV[2] then redis.call('SADD', KEYS[3], ARGV[3]) end
return units
