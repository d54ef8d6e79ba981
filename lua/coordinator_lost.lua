-- The coordinator gave no answer: from when on the region is cut off is for its store to know, for all of its agents.
--
-- KEYS  1 the fence
-- ARGV  1 fingerprint   2 epoch
-- Gives {'fenced'} | {'noted', 1 if the region is cut off, the units that it has overdrawn in this store}

local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'epoch', 'mono', 'last', 'overdrawn')
if fence[1] ~= ARGV[1] or fence[2] ~= ARGV[2] then return {'fenced'} end
local mono = require('parts/clock')(fence[3], fence[4])
local cut_off = require('parts/partition')

cut_off.note(mono)
return {'noted', cut_off.is_so(mono) and 1 or 0, tonumber(fence[5] or 0)}
