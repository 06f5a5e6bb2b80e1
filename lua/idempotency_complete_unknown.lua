-- idempotency_complete_unknown: keep an answer that somebody has found out, if the outcome is still as unknown as they have found it, or another
-- one in the place of what was kept by this before.
--
-- KEYS[1]  record   string, see idempotency_begin                 prefix:2:{idempotency:<part>}:<scope>:<key>:record
-- ARGV[1]  fence    as idempotency_inspect has told it
-- ARGV[2]  found    the state, as idempotency_inspect has told it: 4 unknown; 2 or 3 completed, where that was by this
-- ARGV[3]  state    2 with its answer, 3 without
-- ARGV[4]  keep_ms  how long the answer is kept, 1000 to 31536000000
-- ARGV[5]  answer   bytes
-- ARGV[6]  publish  PUBLISH, or SPUBLISH on a cluster
-- ARGV[7]  channel  where those who wait for it listen, see idempotency_complete
--
-- Value    record: see idempotency_begin; it is of no token, and what is known of the request stays what it was
-- Returns  1 kept; 0 it is not as it was found: somebody has begun, renewed, completed or given it back, or nothing is known of it
-- Errors   TOLLGATE if the value was not written by these scripts; WRONGTYPE
-- Repeat   harmless: the answer is the same as long as what was kept is there
local record, fence, found, state, keep_ms = KEYS[1], ARGV[1] + 0, ARGV[2] + 0, ARGV[3] + 0, ARGV[4] + 0
local answer, publish, channel = ARGV[5], ARGV[6], ARGV[7]

local stored = redis.call('GET', record)
if not stored then
  return 0
end
if #stored < 80 or stored:byte(1) ~= 1 or stored:byte(2) > 3 then
  return redis.error_reply('TOLLGATE the value does not hold an operation of version 1')
end
local is, attempt, last, ends, length_ms = struct.unpack('<BI4I7I7I4', stored, 2)
local nobody = string.rep('\0', 16)
if last ~= fence then
  return 0
end
if is == state and stored:sub(41, 56) == nobody and stored:sub(81) == answer then
  return 1
end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
-- A lease that would last longer than it is long was written before the clock was set back.
local is_unknown = is == 1 and math.min(ends - now, length_ms * 1000) <= 0
local was_kept_by_this = is > 1 and stored:sub(41, 56) == nobody
if not (found == 4 and is_unknown or found == is and was_kept_by_this) then
  return 0
end
local head, payload = stored:sub(25, 40), stored:sub(57, 80)
stored = struct.pack('<BBI4I7I7I4', 1, state, attempt, fence, now, 0) .. head .. nobody .. payload .. answer
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
