-- rate_limit_fixed_window: charge a request to the key's current window if it fits, and say how the window stands.
--
-- A window opens with the first charge and covers window_ms ticks of the server's millisecond clock. The key's expiry is
-- the end of the window, so no other clock is read and nothing is left to clean up.
--
-- KEYS[1]  window     string, expires with the window    prefix:1:{rate_limit:<policy>:<subject>}:fixed:<window_us>
-- ARGV[1]  limit      integer, 1 to 2^32 - 1
-- ARGV[2]  window_ms  integer, 10 to 3.2 * 10^11
-- ARGV[3]  cost       integer, 0 to limit; 0 charges nothing
-- ARGV[4]  peek       1 to charge nothing, 0 otherwise
--
-- Value    version 1: the units used, in decimal digits; any other version would begin with a letter
-- Returns  {1, remaining, 0, reset_us} admitted | {0, remaining, retry_us, reset_us} denied, nothing written
--          In either case an expiry that is missing or too far away is put right.
-- Errors   TOLLGATE if the value was not written by this script; WRONGTYPE
-- Repeat   charges again: not to be resent after a lost reply
--
-- Arguments stay text until they are needed as numbers, and so travel to other commands as they came, without being
-- printed anew.
local call, window = redis.call, KEYS[1]
local limit, window_ms, cost, peek = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local charge = peek == '0' and cost ~= '0'

local used = call('GET', window)
if not used then
  if not charge then
    return {1, limit + 0, 0, 0}
  end
  -- A key is there up to and including the tick of its expiry, so this one is seen for window_ms ticks.
  call('SET', window, cost, 'PX', window_ms - 1)
  return {1, limit - cost, 0, window_ms * 1000}
end
if not used:find('^%d+$') then
  return redis.error_reply('TOLLGATE the value is not a fixed window of version 1')
end

local reset_ms = call('PTTL', window) + 1
if reset_ms <= 0 or reset_ms > window_ms + 0 then
  -- Somebody took the expiry away, or the server's clock was set back. Either would deny for longer than a window.
  call('PEXPIRE', window, window_ms - 1)
  reset_ms = window_ms + 0
end

-- Below zero if the limit was lowered in the meantime.
local left = limit - used
if left < cost + 0 and cost ~= '0' then
  return {0, math.max(left, 0), reset_ms * 1000, reset_ms * 1000}
end
if charge then
  left = limit - call('INCRBY', window, cost)
end
return {1, math.max(left, 0), 0, reset_ms * 1000}
