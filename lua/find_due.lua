-- Find the quotas of a lane whose report is due, and those that are taken along.
--
-- KEYS[1]  fence
-- KEYS[2]  lane
-- KEYS[3]  dirty set of the lane
-- ARGV[1]  fingerprint
-- ARGV[2]  maximum number of quotas
-- ARGV[3]  1 if the lane sends a batch in any case, else 0
-- ARGV[4]  how many microseconds before it is due a report is taken along with a batch
-- Returns  {'fenced'} | {'due', mono, since, first, quota key …}: `since` is the moment of the oldest usage in a batch
--          that waits for its receipt, '' if there is none; `first` is the quota whose report is due first, '' if no
--          quota has anything to report

local clock = require('parts/clock')

local function whole(number) return string.format('%.0f', number) end

return function()
  local fence = redis.call('HMGET', KEYS[1], 'fingerprint', 'mono', 'last')
  if fence[1] ~= ARGV[1] then return {'fenced'} end
  local mono = clock.read(fence[2], fence[3])

  local first = redis.call('ZRANGE', KEYS[3], 0, 0, 'WITHSCORES')
  local answer = {'due', whole(mono), redis.call('HGET', KEYS[2], 'frozen_since') or '', first[1] or ''}
  if first[1] and (ARGV[3] == '1' or tonumber(first[2]) <= mono) then
    local until_moment = whole(mono + ARGV[4])
    for _, quota in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', until_moment, 'LIMIT', 0, ARGV[2])) do
      answer[#answer + 1] = quota
    end
  end
  return answer
end
