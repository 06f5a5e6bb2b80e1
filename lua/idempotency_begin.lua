-- idempotency_begin: claim an operation, or report its state.
--
-- Includes idempotency_record
-- KEYS[1]  record      string, expires `keep_ms` after the lease  prefix:2:{idempotency:<part>}:<scope>:<key>:record
-- KEYS[2]  records     sorted set, expires some time after its last record
--                                                                 prefix:2:{idempotency}:<caller>:records, on a cluster {idempotency:<part>}
-- ARGV[1]  token       16 random bytes, new for each attempt
-- ARGV[2]  head        16 bytes, fingerprint of the request without its body
-- ARGV[3]  lease_ms    integer, 10 to 86400000
-- ARGV[4]  keep_ms     how long the record is kept after the lease, 1000 to 31536000000
-- ARGV[5]  takes_over  1 to execute again if the outcome is unknown, otherwise 0
-- ARGV[6]  max_records maximum number of records of the caller, 0 for no bound
--
-- Value    record, numbers in little endian:
--            1 byte    version 1
--            1 byte    state: 0 free, 1 in flight, 2 completed, 3 completed without a response
--            4 bytes   number of the attempt
--            7 bytes   fence
--            7 bytes   in flight: the end of the lease in us; completed: the time of completion; free: 0
--            4 bytes   in flight: the length of the lease in ms; otherwise 0
--            16 bytes  head
--            16 bytes  token
--            24 bytes  body, the fingerprint of the body: 1 byte 0 none, 1 partial, 2 complete; 7 bytes length; 16 bytes digest
--            rest      completed: the response. Otherwise the last checkpoint, see idempotency_renew, or nothing. After a takeover from an
--                      attempt without a checkpoint: five zeros
--          records: for each record of the caller the first 20 digits of the SHA-1 of its key, and the time in ms until which the record
--          counts
-- Returns  {0}                                         the key is used by another request
--          {1, fence, attempt, body, checkpoint}       claimed; body and checkpoint are those of earlier attempts
--          {2, remaining_ms, body}                     in flight
--          {3, attempt, body}                          the outcome is unknown, since the lease ended before completion
--          {4, body, response}                         completed
--          {5, body, mark}                             completed; the mark stands for the response, which is not stored
--          {6, remaining_ms}                           no record, and the caller has max_records; the first of them ends after remaining_ms
-- Repeat   harmless: the token in flight renews its lease and gets the same reply. A released token gets {2, 1, body} while the free record
--          holds the token: until another token claims or is released, or the operation is forgotten
local records, token, head = KEYS[2], ARGV[1], ARGV[2]
local lease_ms, keep_ms, takes_over, max_records = ARGV[3] + 0, ARGV[4] + 0, ARGV[5] == '1', ARGV[6] + 0

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local state, attempt, fence, ends, length_ms = 0, 0, 0, 0, 0
local holder, body, rest = '', string.rep('\0', 24), ''
local taken_over = string.rep('\0', 5)
if stored then
  state, attempt, fence, ends, length_ms = struct.unpack('<BI4I7I7I4', stored, 2)
  holder, rest = stored:sub(41, 56), stored:sub(81)
end
if state == 0 and holder == token then
  return {2, 1, body}
end
local now_ms = math.floor(now / 1000)
local member = max_records > 0 and redis.sha1hex(record):sub(1, 20)
-- A free record may be uncounted, for instance because its release found no room.
if state == 0 and max_records > 0 and not (stored and redis.call('ZSCORE', records, member)) then
  local count = redis.call('ZCARD', records)
  -- If the count is a multiple of eight or has reached the maximum, up to sixteen ended records are removed.
  if count % 8 == 0 or count >= max_records then
    local ended = redis.call('ZRANGEBYSCORE', records, '-inf', now_ms, 'LIMIT', 0, 16)
    if #ended > 0 then
      count = count - redis.call('ZREM', records, unpack(ended))
    end
  end
  if count >= max_records then
    local first = redis.call('ZRANGE', records, 0, 0, 'WITHSCORES')
    return {6, math.max(first[2] - now_ms, 1)}
  end
end
local is_ours = state == 1 and holder == token
-- A released record is free for any request, unless it may have had effects: after a checkpoint or a takeover.
if state > 0 or #rest > 0 then
  -- Checked first: another request learns nothing about this record.
  if stored:sub(25, 40) ~= head then
    return {0}
  end
  body = stored:sub(57, 80)
end
if state > 1 then
  return {state + 2, body, rest}
end
if state == 1 then
  -- If a lease ends later than now plus its length, the clock was set back after the lease began.
  if ends - now > length_ms * 1000 then
    ends = now + length_ms * 1000
    stored = struct.pack('<BBI4I7I7I4', 1, 1, attempt, fence, ends, length_ms) .. stored:sub(25)
    redis.call('SET', record, stored, 'PX', length_ms + keep_ms)
  end
  if ends > now and not is_ours then
    return {2, math.ceil((ends - now) / 1000), body}
  end
  if not takes_over and not is_ours then
    return {3, attempt, body}
  end
end
if not is_ours then
  -- At least the clock, in case the last fence was forgotten; above the last fence, in case the clock was set back.
  fence = math.max(fence + 1, now)
  attempt = math.min(attempt + 1, 4294967295)
  if state == 1 and #rest == 0 then
    rest = taken_over
  end
end
-- Count first: on a full server the ZADD fails, and then the script has written no record.
if max_records > 0 and not is_ours then
  redis.call('ZADD', records, now_ms + lease_ms + keep_ms, member)
  -- Longer than needed, so that this is not repeated each time.
  if redis.call('PTTL', records) < lease_ms + keep_ms then
    redis.call('PEXPIRE', records, 2 * (lease_ms + keep_ms))
  end
end
ends = now + lease_ms * 1000
stored = struct.pack('<BBI4I7I7I4', 1, 1, attempt, fence, ends, lease_ms) .. head .. token .. body .. rest
redis.call('SET', record, stored, 'PX', lease_ms + keep_ms)
return {1, fence, attempt, body, rest == taken_over and '' or rest}
