-- delay_queue_time: the time in ms, and how long keys are kept.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- Times count from the end of this millisecond, so that none is early or short.
local later = time[2] % 1000 > 0 and now + 1 or now

local function keep(key, ms)
  if redis.call('PTTL', key) < ms then
    redis.call('PEXPIRE', key, ms + 86400000)
  end
end
