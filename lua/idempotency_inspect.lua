-- idempotency_inspect: how far an operation is.
--
-- KEYS[1]  record  string, see idempotency_begin                  prefix:2:{idempotency:<part>}:<scope>:<key>:record
-- ARGV[1]  most    how many bytes a checkpoint may have; nothing is told of a longer one
--
-- Value    record: see idempotency_begin; it stays as it is, but for the end of a lease that was written before the clock was set back
-- Returns  {} nothing is known of it | {state, fence, attempt, lasts_ms, kept_ms, checkpoint}: state is that of the record, or 4 if the lease
--          has ended and nothing more was said, so that the outcome is unknown; lasts_ms is until the end of the lease, or since then; kept_ms
--          until all of this is forgotten; checkpoint is empty if there is none
-- Errors   TOLLGATE if the value was not written by these scripts; WRONGTYPE
-- Repeat   harmless
local record, most = KEYS[1], ARGV[1] + 0

local stored = redis.call('GET', record)
if not stored then
  return {}
end
if #stored < 80 or stored:byte(1) ~= 1 or stored:byte(2) > 3 then
  return redis.error_reply('TOLLGATE the value does not hold an operation of version 1')
end
local state, attempt, fence, ends, length_ms = struct.unpack('<BI4I7I7I4', stored, 2)
local lasts_ms, checkpoint = 0, ''
if state < 2 and #stored <= 80 + most and stored:sub(81) ~= string.rep('\0', 5) then
  checkpoint = stored:sub(81)
end
if state == 1 then
  local time = redis.call('TIME')
  local left = ends - time[1] * 1000000 - time[2]
  -- A lease that would last longer than it is long was written before the clock was set back.
  if left > length_ms * 1000 then
    ends, left = ends - left + length_ms * 1000, length_ms * 1000
    stored = stored:sub(1, 13) .. struct.pack('<I7', ends) .. stored:sub(21)
    -- Whoever looks where memory is full is told all the same.
    redis.pcall('SET', record, stored, 'KEEPTTL')
  end
  if left <= 0 then
    state = 4
  end
  lasts_ms = math.ceil(math.abs(left) / 1000)
end
return {state, fence, attempt, lasts_ms, math.max(redis.call('PTTL', record), 0), checkpoint}
