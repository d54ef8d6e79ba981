-- Forget what rates have counted of some keys, because people have reset them.
--
-- KEYS[1]  fence
-- then, for each key of a reset:
-- KEYS     its state (parts/share)
-- KEYS     its log; only a sliding log has one
-- ARGV[1]  fingerprint
-- then, for each key of a reset:
-- ARGV     the number of its reset
-- Flags    allow-oom: it frees memory, so a full store runs it as well
-- Returns  {'fenced'} | {'reset', how many keys were reset}
--
-- Each agent of the region calls it for each reset, and the first call does it: `resets` of the fence is the highest
-- number so far. So resets come in the order of their numbers, all keys of one in one call. A share that the
-- coordinator gave is kept.

local share = require('parts/share')

return function()
  local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'resets')
  if fence[1] ~= ARGV[1] then return {'fenced'} end
  local known, count = tonumber(fence[2] or 0), 0
  local last = known
  for i = 2, #ARGV do
    local number = tonumber(ARGV[i])
    if number > known then
      share.forget(KEYS[2 * i - 2])
      redis.call('DEL', KEYS[2 * i - 1])
      last, count = math.max(last, number), count + 1
    end
  end
  if last > known then redis.call('HSET', KEYS[1], 'resets', string.format('%.0f', last)) end
  return {'reset', count}
end
