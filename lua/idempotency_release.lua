-- idempotency_release: release an operation without a result, if the token still holds it.
--
-- Includes server_notify
-- KEYS[1]  record   string, see idempotency_begin                 prefix:2:{idempotency:<part>}:<scope>:<key>:record
-- KEYS[2]  records  sorted set, see idempotency_begin             prefix:2:{idempotency}:<caller>:records, on a cluster {idempotency:<part>}
-- ARGV[1]  token    of the attempt
-- ARGV[2]  keep_ms  how long the last fence and the number of attempts are remembered
-- ARGV[3]  publish  PUBLISH, or SPUBLISH on a cluster
-- ARGV[4]  channel  channel of the waiters, see idempotency_complete
-- ARGV[5]  max_records  maximum number of records of the caller, 0 for no bound
--
-- Value    record: see idempotency_begin. A free record has no head and no body, unless it has a checkpoint or was taken over. Then it
--          keeps both, stays bound to its request, and expires no earlier than before
-- Returns  1 released, or never begun: this token cannot claim it until another token claims or is released, or the operation is forgotten;
--          0 held by another token, or completed
-- Errors   TOLLGATE if these scripts did not write the value; WRONGTYPE
-- Repeat   harmless
local record, records, token, keep_ms, publish, channel = KEYS[1], KEYS[2], ARGV[1], ARGV[2] + 0, ARGV[3], ARGV[4]
local max_records = ARGV[5] + 0

local none = string.rep('\0', 24)
local attempt, fence, head, body, checkpoint = 0, 0, none:sub(1, 16), none, ''
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
    head, body, checkpoint = stored:sub(25, 40), stored:sub(57, 80), stored:sub(81)
    keep_ms = math.max(keep_ms, redis.call('PTTL', record))
  end
end
-- The call of idempotency_begin may still arrive. Because the free record has its token, that call claims nothing.
stored = struct.pack('<BBI4I7I7I4', 1, 0, attempt, fence, 0, 0) .. head .. token .. body .. checkpoint
-- On a full server the first write of a script must need no memory.
redis.pcall('PEXPIRE', record, keep_ms)
redis.call('SET', record, stored, 'PX', keep_ms)
if max_records > 0 then
  local member = redis.sha1hex(record):sub(1, 20)
  -- If the caller has reached its maximum, an uncounted record stays uncounted, and idempotency_begin rejects its key like a new key.
  if redis.call('ZCARD', records) < max_records or redis.call('ZSCORE', records, member) then
    local time = redis.call('TIME')
    redis.pcall('ZADD', records, math.floor(time[1] * 1000 + time[2] / 1000) + keep_ms, member)
    if redis.call('PTTL', records) < keep_ms then
      redis.call('PEXPIRE', records, keep_ms)
    end
  end
end
notify(publish, channel, '1')
return 1
