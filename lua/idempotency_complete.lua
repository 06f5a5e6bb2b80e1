-- idempotency_complete: store the response of an attempt, if the token still holds the operation.
--
-- Includes server_notify
-- KEYS[1]  record   string, see idempotency_begin                 prefix:2:{idempotency:<part>}:<scope>:<key>:record
-- ARGV[1]  token    of the attempt
-- ARGV[2]  state    2 with the response, 3 without
-- ARGV[3]  keep_ms  how long the response is kept, 1000 to 31536000000
-- ARGV[4]  body     24 bytes, the fingerprint of the body
-- ARGV[5]  answer   bytes
-- ARGV[6]  publish  PUBLISH, or SPUBLISH on a cluster
-- ARGV[7]  channel  channel of the waiters. Not in KEYS: two keys would fail while a slot moves
--                                                                   prefix:2:{idempotency:<part>}:<scope>:<key>:done
--
-- Value    record: see idempotency_begin; the head of the request stays
-- Returns  1 stored, also if the lease had ended without a new attempt; 0 the token lost the operation
-- Errors   WRONGTYPE
-- Repeat   harmless: a record that this token completed stays, and the reply is 1
local record, token, state, keep_ms = KEYS[1], ARGV[1], ARGV[2] + 0, ARGV[3] + 0
local body, answer, publish, channel = ARGV[4], ARGV[5], ARGV[6], ARGV[7]

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
stored = struct.pack('<BBI4I7I7I4', 1, state, attempt, fence, now, 0) .. stored:sub(25, 56) .. body .. answer
-- On a full server the first write of a script must need no memory.
redis.pcall('PEXPIRE', record, keep_ms)
redis.call('SET', record, stored, 'PX', keep_ms)
notify(publish, channel, '1')
return 1
