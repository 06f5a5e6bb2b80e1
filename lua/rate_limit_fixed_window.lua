-- rate_limit_fixed_window: charge a request to the key's current window if it fits, and say how the window stands.
--
-- A window opens with the first charge and lasts window_us; the count closes with it.
--
-- KEYS[1]  window     string, expires with the window    prefix:1:{rate_limit:<policy>:<subject>}:fixed:<window_us>
-- ARGV[1]  limit      integer, 1 to 2^32 - 1
-- ARGV[2]  window_us  integer, 1,000 to 3.2 * 10^14
-- ARGV[3]  cost       integer, 0 to limit; 0 charges nothing
-- ARGV[4]  peek       1 to charge nothing, 0 otherwise
--
-- Value    version 1: one byte 1, seven bytes end of the window in us, six bytes used; little endian
-- Returns  {1, remaining, 0, reset_us} admitted | {0, remaining, retry_us, reset_us} denied, nothing written
-- Errors   TOLLGATE if the value was not written by this script; WRONGTYPE
-- Repeat   charges again: not to be resent after a lost reply
local window = KEYS[1]
local limit, window_us, cost, peek = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

-- The key outlives its window by this much, since expiry is counted in whole milliseconds of another reading of the clock.
local GRACE_MS = 10
local FORMAT = '<I1I7I6'

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])

local ends, used = now + window_us, 0
local stored = redis.call('GET', window)
if stored then
  if #stored ~= 14 or stored:byte(1) ~= 1 then
    return redis.error_reply('TOLLGATE the value is not a fixed window of version 1')
  end
  local _, stored_ends, stored_used = struct.unpack(FORMAT, stored)
  if stored_ends > now then
    -- Never further away than a whole window, even if the clock was set back.
    ends, used = math.min(stored_ends, ends), stored_used
  end
end

local left = math.max(limit - used, 0)
if cost > left then
  return {0, left, ends - now, ends - now}
end

if peek == 0 and cost > 0 then
  used = used + cost
  redis.call('SET', window, struct.pack(FORMAT, 1, ends, used), 'PX', math.ceil((ends - now) / 1000) + GRACE_MS)
end
return {1, math.max(limit - used, 0), 0, used > 0 and ends - now or 0}
