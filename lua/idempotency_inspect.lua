-- idempotency_inspect: report the state of an operation.
--
-- Includes idempotency_record
-- KEYS[1]  record  string, see idempotency_begin                  prefix:2:{idempotency:<part>}:<scope>:<key>:record
-- ARGV[1]  max_bytes  maximum size of a checkpoint; a longer one is not returned
--
-- Value    record: see idempotency_begin; unchanged, except that a lease is shortened if the clock was set back after the lease began
-- Returns  {} without a record, or {state, fence, attempt, lasts_ms, kept_ms, checkpoint}
--            state       that of the record, or 4 if the lease ended without a result, so that the outcome is unknown
--            lasts_ms    until the end of the lease, or since then
--            kept_ms     until the record expires
--            checkpoint  empty if there is none
-- Repeat   harmless
local max_bytes = ARGV[1] + 0

if not stored then
  return {}
end
local state, attempt, fence, ends, length_ms = struct.unpack('<BI4I7I7I4', stored, 2)
local lasts_ms, checkpoint = 0, ''
if state < 2 and #stored <= 80 + max_bytes and stored:sub(81) ~= string.rep('\0', 5) then
  checkpoint = stored:sub(81)
end
if state == 1 then
  local time = redis.call('TIME')
  local left = ends - time[1] * 1000000 - time[2]
  -- If a lease ends later than now plus its length, the clock was set back after the lease began.
  if left > length_ms * 1000 then
    ends, left = ends - left + length_ms * 1000, length_ms * 1000
    stored = stored:sub(1, 13) .. struct.pack('<I7', ends) .. stored:sub(21)
    -- Report the state also if the server is out of memory.
    redis.pcall('SET', record, stored, 'KEEPTTL')
  end
  if left <= 0 then
    state = 4
  end
  lasts_ms = math.ceil(math.abs(left) / 1000)
end
return {state, fence, attempt, lasts_ms, math.max(redis.call('PTTL', record), 0), checkpoint}
