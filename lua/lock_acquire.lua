-- lock_acquire: take the lease if it is free, or say how long the holder may keep it.
--
-- KEYS[1]  lease    string, expires `keep_ms` after the lease  prefix:2:{lock:<namespace>:<subject>}:lease
-- ARGV[1]  token    16 random bytes, another for each acquisition
-- ARGV[2]  ttl_ms   integer, 10 to 86400000
-- ARGV[3]  fences   how many fencing tokens to set aside, 1 to 65536, the same whenever this token is sent
-- ARGV[4]  keep_ms  how long the last fence is remembered after the lease
--
-- Value    lease: 1 byte version 1, 7 bytes the last fence that was given out, 7 bytes the end of the lease in us, 4 bytes its
--          length in ms, little endian, then the token of the holder; once the lease is given back the end and the length are
--          zeros and there is no token
-- Returns  {1, fence} granted: the fences from this one on are the holder's; {0, remaining_ms} held by somebody else
-- Errors   TOLLGATE if the value was not written by these scripts; WRONGTYPE
-- Repeat   harmless: with the token of the holder the lease is made to last its whole length again, with the same fences
local lease, token, ttl_ms, fences, keep_ms = KEYS[1], ARGV[1], ARGV[2] + 0, ARGV[3] + 0, ARGV[4] + 0

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local fence, ends, length_ms, holder = 0, 0, 0, ''
local stored = redis.call('GET', lease)
if stored then
  if (#stored ~= 19 and #stored ~= 35) or stored:byte(1) ~= 1 then
    return redis.error_reply('TOLLGATE the value does not hold a lease of version 1')
  end
  fence, ends, length_ms = struct.unpack('<I7I7I4', stored, 2)
  holder = stored:sub(20)
end
-- A lease that would last longer than it is long was written before the clock was set back.
if ends - now > length_ms * 1000 then
  ends = now + length_ms * 1000
  redis.call('SET', lease, struct.pack('<BI7I7I4', 1, fence, ends, length_ms) .. holder, 'PX', length_ms + keep_ms)
end
if ends > now and holder ~= token then
  return {0, math.ceil((ends - now) / 1000)}
end
if ends <= now then
  -- The clock alone would do, were it never set back; the last fence alone would do, were it never forgotten.
  fence = math.max(fence, now - 1) + fences
end
ends = now + ttl_ms * 1000
redis.call('SET', lease, struct.pack('<BI7I7I4', 1, fence, ends, ttl_ms) .. token, 'PX', ttl_ms + keep_ms)
return {1, fence - fences + 1}
