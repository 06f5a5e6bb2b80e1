-- idempotency_complete_unknown: store a response that an operator determined, if the outcome is still unknown as inspected. Also replaces
-- a response that this script stored.
--
-- Includes server_notify, idempotency_record
-- KEYS[1]  record   string, see idempotency_begin                 prefix:2:{idempotency:<part>}:<scope>:<key>:record
-- ARGV[1]  fence    from idempotency_inspect
-- ARGV[2]  found    state from idempotency_inspect: 4 unknown; 2 or 3 completed by this script
-- ARGV[3]  state    2 with the response, 3 without
-- ARGV[4]  keep_ms  how long the response is kept, 1000 to 31536000000
-- ARGV[5]  answer   bytes
-- ARGV[6]  publish  PUBLISH, or SPUBLISH on a cluster
-- ARGV[7]  channel  channel of the waiters, see idempotency_complete
--
-- Value    record: see idempotency_begin; without a token, and with the fingerprints of the request
-- Returns  1 stored; 0 the record changed since it was inspected, or is gone
-- Repeat   harmless: the reply is the same while the response is stored
local fence, found, state, keep_ms = ARGV[1] + 0, ARGV[2] + 0, ARGV[3] + 0, ARGV[4] + 0
local answer, publish, channel = ARGV[5], ARGV[6], ARGV[7]

if not stored then
  return 0
end
local current, attempt, current_fence, ends = struct.unpack('<BI4I7I7I4', stored, 2)
local nobody = string.rep('\0', 16)
if current_fence ~= fence then
  return 0
end
if current == state and stored:sub(41, 56) == nobody and stored:sub(81) == answer then
  return 1
end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
-- The outcome is unknown if the lease has ended.
local is_unknown = current == 1 and ends <= now
local is_by_operator = current > 1 and stored:sub(41, 56) == nobody
if not (found == 4 and is_unknown or found == current and is_by_operator) then
  return 0
end
local head, body = stored:sub(25, 40), stored:sub(57, 80)
stored = struct.pack('<BBI4I7I7I4', 1, state, attempt, fence, now, 0) .. head .. nobody .. body .. answer
-- On a full server the first write of a script must need no memory.
redis.pcall('PEXPIRE', record, keep_ms)
redis.call('SET', record, stored, 'PX', keep_ms)
notify(publish, channel, '1')
return 1
