-- idempotency_complete: keep the answer of an attempt, if the operation is still the token's.
--
-- KEYS[1]  record   string, see idempotency_begin                 prefix:2:{idempotency:<part>}:<scope>:<key>:record
-- ARGV[1]  token    of the attempt
-- ARGV[2]  state    2 with its answer, 3 without
-- ARGV[3]  keep_ms  how long the answer is kept, 1000 to 31536000000
-- ARGV[4]  payload  24 bytes, the fingerprint of the body
-- ARGV[5]  answer   bytes
-- ARGV[6]  publish  PUBLISH, or SPUBLISH on a cluster
-- ARGV[7]  channel  where those who wait for it listen. No key: with two of them nothing could be said while a slot moves
--                                                                   prefix:2:{idempotency:<part>}:<scope>:<key>:done
--
-- Value    record: see idempotency_begin; the head of the request stays what it was
-- Returns  1 kept, also where the lease had ended and nobody has begun anew; 0 not this token's any more
-- Errors   WRONGTYPE
-- Repeat   harmless: what is completed by this token already stays as it is, and the answer is 1
local record, token, state, keep_ms = KEYS[1], ARGV[1], ARGV[2] + 0, ARGV[3] + 0
local payload, answer, publish, channel = ARGV[4], ARGV[5], ARGV[6], ARGV[7]

local stored = redis.call('GET', record) or ''
if #stored < 80 or stored:byte(1) ~= 1 or stored:sub(41, 56) ~= token or stored:byte(2) == 0 then
  return 0
end
if stored:byte(2) > 1 then
  return 1
end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local attempt, fence = struct.unpack('<I4I7', stored, 3)
stored = struct.pack('<BBI4I7I7I4', 1, state, attempt, fence, now, 0) .. stored:sub(25, 56) .. payload .. answer
-- Where memory is full, something has to be written first that needs none.
redis.pcall('PEXPIRE', record, keep_ms)
redis.call('SET', record, stored, 'PX', keep_ms)
-- A user who may not publish is served all the same; those who wait look now and then.
local listeners = redis.pcall(publish, channel, '1')
if publish == 'SPUBLISH' and type(listeners) ~= 'number' then
  -- Redis 6.2 does not know it.
  redis.pcall('PUBLISH', channel, '1')
end
return 1
