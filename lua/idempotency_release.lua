-- idempotency_release: give an operation back that was begun and is not to be kept, if it is still the token's.
--
-- KEYS[1]  record   string, see idempotency_begin                 prefix:2:{idempotency:<scope>:<key>}:record
-- ARGV[1]  token    of the attempt
-- ARGV[2]  keep_ms  how long the last fence and the number of attempts are remembered
--
-- Value    record: see idempotency_begin; one that is free has no head
-- Returns  1 given back, or never begun: this token can claim it no more; 0 it is somebody else's, or completed
-- Errors   TOLLGATE if the value was not written by these scripts; WRONGTYPE
-- Repeat   harmless
local record, token, keep_ms = KEYS[1], ARGV[1], ARGV[2] + 0

local attempt, fence = 0, 0
local stored = redis.call('GET', record)
if stored then
  if #stored < 80 or stored:byte(1) ~= 1 then
    return redis.error_reply('TOLLGATE the value does not hold an operation of version 1')
  end
  if stored:byte(2) > 1 or (stored:byte(2) == 1 and stored:sub(41, 56) ~= token) then
    return 0
  end
  attempt, fence = struct.unpack('<I4I7', stored, 3)
end
-- The claim itself may still be on its way, and comes to nothing then.
local none = string.rep('\0', 24)
stored = struct.pack('<BBI4I7I7I4', 1, 0, attempt, fence, 0, 0) .. none:sub(1, 16) .. token .. none
redis.call('SET', record, stored, 'PX', keep_ms)
return 1
