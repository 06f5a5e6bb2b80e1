-- idempotency_release: give an operation back that was begun and is not to be kept, if it is still the token's.
--
-- KEYS[1]  record   string, see idempotency_begin                 prefix:2:{idempotency:<part>}:<scope>:<key>:record
-- KEYS[2]  records  sorted set, see idempotency_begin             prefix:2:{idempotency}:<caller>:records, on a cluster {idempotency:<part>}
-- ARGV[1]  token    of the attempt
-- ARGV[2]  keep_ms  how long the last fence and the number of attempts are remembered
-- ARGV[3]  publish  PUBLISH, or SPUBLISH on a cluster
-- ARGV[4]  channel  where those who wait for it listen, see idempotency_complete
-- ARGV[5]  most     how many records there may be, 0 for no bound
--
-- Value    record: see idempotency_begin; one that is free has no head, unless it has a checkpoint or was taken over: it stays that
--          of the same request then, and for no less time than it had
-- Returns  1 given back, or never begun: this token can claim it no more, until another one is given back unclaimed; 0 it is somebody else's, or completed
-- Errors   TOLLGATE if the value was not written by these scripts; WRONGTYPE
-- Repeat   harmless
local record, records, token, keep_ms, publish, channel = KEYS[1], KEYS[2], ARGV[1], ARGV[2] + 0, ARGV[3], ARGV[4]
local most = ARGV[5] + 0

local none = string.rep('\0', 24)
local attempt, fence, head, payload, checkpoint = 0, 0, none:sub(1, 16), none, ''
local stored = redis.call('GET', record)
if stored then
  if #stored < 80 or stored:byte(1) ~= 1 then
    return redis.error_reply('TOLLGATE the value does not hold an operation of version 1')
  end
  if stored:byte(2) > 1 or (stored:byte(2) == 1 and stored:sub(41, 56) ~= token) then
    return 0
  end
  attempt, fence = struct.unpack('<I4I7', stored, 3)
  if #stored > 80 then
    head, payload, checkpoint = stored:sub(25, 40), stored:sub(57, 80), stored:sub(81)
    keep_ms = math.max(keep_ms, redis.call('PTTL', record))
  end
end
-- The claim itself may still be on its way, and comes to nothing then.
stored = struct.pack('<BBI4I7I7I4', 1, 0, attempt, fence, 0, 0) .. head .. token .. payload .. checkpoint
-- Where memory is full, something has to be written first that needs none.
redis.pcall('PEXPIRE', record, keep_ms)
redis.call('SET', record, stored, 'PX', keep_ms)
if most > 0 then
  local member = redis.sha1hex(record):sub(1, 20)
  -- Where there is no room, the record of a claim that never arrived is not counted, and its key is refused like a new one.
  if redis.call('ZCARD', records) < most or redis.call('ZSCORE', records, member) then
    local time = redis.call('TIME')
    redis.pcall('ZADD', records, math.floor(time[1] * 1000 + time[2] / 1000) + keep_ms, member)
    if redis.call('PTTL', records) < keep_ms then
      redis.call('PEXPIRE', records, keep_ms)
    end
  end
end
-- A user who may not publish is served all the same; those who wait look now and then.
local listeners = redis.pcall(publish, channel, '1')
if publish == 'SPUBLISH' and type(listeners) ~= 'number' then
  -- Redis 6.2 does not know it.
  redis.pcall('PUBLISH', channel, '1')
end
return 1
