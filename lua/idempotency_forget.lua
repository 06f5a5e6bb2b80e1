-- idempotency_forget: free an operation for any request, if it is still in the inspected state.
--
-- Includes server_notify, idempotency_record
-- KEYS[1]  record   string, see idempotency_begin                 prefix:2:{idempotency:<part>}:<scope>:<key>:record
-- ARGV[1]  state    from idempotency_inspect, 0 to 4
-- ARGV[2]  fence    from idempotency_inspect
-- ARGV[3]  keep_ms  how long the last fence and the number of attempts are remembered
-- ARGV[4]  publish  PUBLISH, or SPUBLISH on a cluster
-- ARGV[5]  channel  channel of the waiters, see idempotency_complete
--
-- Value    record: see idempotency_begin; free, without a request and without a token
-- Returns  1 forgotten; 0 the record changed since it was inspected, or is gone
-- Repeat   harmless: the reply is the same until the next attempt
local state, fence, keep_ms = ARGV[1] + 0, ARGV[2] + 0, ARGV[3] + 0
local publish, channel = ARGV[4], ARGV[5]

if not stored then
  return 0
end
local current, attempt, current_fence, ends = struct.unpack('<BI4I7I7I4', stored, 2)
local none = string.rep('\0', 56)
if current == 1 then
  local time = redis.call('TIME')
  if ends <= time[1] * 1000000 + time[2] then
    current = 4
  end
elseif current == 0 and stored:sub(25) == none then
  -- This script freed it before.
  current = state
end
if current ~= state or current_fence ~= fence then
  return 0
end
-- On a full server the first write of a script must need no memory.
redis.pcall('PEXPIRE', record, keep_ms)
redis.call('SET', record, struct.pack('<BBI4I7I7I4', 1, 0, attempt, current_fence, 0, 0) .. none, 'PX', keep_ms)
notify(publish, channel, '1')
return 1
