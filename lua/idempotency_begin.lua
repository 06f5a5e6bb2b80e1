-- idempotency_begin: claim an operation that nobody has begun, or say how far it is.
--
-- KEYS[1]  record      string, expires `keep_ms` after the lease  prefix:2:{idempotency:<part>}:<scope>:<key>:record
-- KEYS[2]  records     sorted set, expires some time after its last member ends
--                                                                 prefix:2:{idempotency}:<caller>:records, on a cluster {idempotency:<part>}
-- ARGV[1]  token       16 random bytes, another for each attempt
-- ARGV[2]  head        16 bytes, the fingerprint of what is known of the request before its body is read
-- ARGV[3]  lease_ms    integer, 10 to 86400000
-- ARGV[4]  keep_ms     how long the record is kept after the lease, 1000 to 31536000000
-- ARGV[5]  takes_over  1 if an attempt whose outcome is unknown is to be made again, otherwise 0
-- ARGV[6]  most        how many records there may be, 0 for no bound
--
-- Value    record: 1 byte version 1, 1 byte state (0 free, 1 in flight, 2 completed, 3 completed without its answer), 4 bytes the
--          number of the attempt, 7 bytes its fence, 7 bytes the end of the lease in us, 4 bytes its length in ms (of what is
--          completed: when it was, and 0), little endian; then 16 bytes head, 16 bytes token, 24 bytes payload (the fingerprint
--          of the body: 1 byte 0 none, 1 part of it, 2 all of it; 7 bytes how much; 16 bytes digest), then the answer, or
--          before that the last checkpoint, if there is one: see idempotency_checkpoint; or five zeros in its place, where an
--          attempt of unknown outcome was taken over that had put down none
--          records: for each record of the caller the start of the SHA-1 of its key, and when it ends in ms
-- Returns  {0} another request used this key; {1, fence, attempt, payload, checkpoint} the token's to do, and what is known of
--          the attempts before; {2, remaining_ms, payload} in flight; {3, attempt, payload} outcome unknown: the lease ended
--          before it was completed; {4, payload, answer} completed; {5, payload, answer} completed, and the answer was not kept;
--          {6, remaining_ms} there is no record, and no room for one more until the first of the others ends
-- Errors   TOLLGATE if the value was not written by these scripts; WRONGTYPE
-- Repeat   harmless: with the token in flight the lease lasts its whole length again, and the answer is the same; a token that
--          was given back claims nothing any more, until another one is given back unclaimed
local record, records, token, head = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local lease_ms, keep_ms, takes_over, most = ARGV[3] + 0, ARGV[4] + 0, ARGV[5] == '1', ARGV[6] + 0

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local state, attempt, fence, ends, length_ms = 0, 0, 0, 0, 0
local holder, payload, rest = '', string.rep('\0', 24), ''
local taken_over = string.rep('\0', 5)
local stored = redis.call('GET', record)
if stored then
  if #stored < 80 or stored:byte(1) ~= 1 or stored:byte(2) > 3 then
    return redis.error_reply('TOLLGATE the value does not hold an operation of version 1')
  end
  state, attempt, fence, ends, length_ms = struct.unpack('<BI4I7I7I4', stored, 2)
  holder, rest = stored:sub(41, 56), stored:sub(81)
end
if state == 0 and holder == token then
  return {2, 1, payload}
end
local now_ms = math.floor(now / 1000)
local member = most > 0 and redis.sha1hex(record):sub(1, 20)
-- A free record may be one that was released before its claim arrived, and is counted like a new one then.
if state == 0 and most > 0 and not (stored and redis.call('ZSCORE', records, member)) then
  local count = redis.call('ZCARD', records)
  -- For each eight that come up to sixteen go, so there are never many that have ended.
  if count % 8 == 0 or count >= most then
    local ended = redis.call('ZRANGEBYSCORE', records, '-inf', now_ms, 'LIMIT', 0, 16)
    if #ended > 0 then
      count = count - redis.call('ZREM', records, unpack(ended))
    end
  end
  if count >= most then
    local first = redis.call('ZRANGE', records, 0, 0, 'WITHSCORES')
    return {6, math.max(first[2] - now_ms, 1)}
  end
end
local is_ours = state == 1 and holder == token
-- What was given back is any request's again, unless something may have come of it: what has left a checkpoint, or was taken over.
if state > 0 or #rest > 0 then
  -- Before anything else is said: whoever sends something else learns nothing about this.
  if stored:sub(25, 40) ~= head then
    return {0}
  end
  payload = stored:sub(57, 80)
end
if state > 1 then
  return {state + 2, payload, rest}
end
if state == 1 then
  -- A lease that would last longer than it is long was written before the clock was set back.
  if ends - now > length_ms * 1000 then
    ends = now + length_ms * 1000
    stored = struct.pack('<BBI4I7I7I4', 1, 1, attempt, fence, ends, length_ms) .. stored:sub(25)
    redis.call('SET', record, stored, 'PX', length_ms + keep_ms)
  end
  if ends > now and not is_ours then
    return {2, math.ceil((ends - now) / 1000), payload}
  end
  if not takes_over and not is_ours then
    return {3, attempt, payload}
  end
end
if not is_ours then
  -- The clock alone would do, were it never set back; the last fence alone would do, were it never forgotten.
  fence = math.max(fence, now - 1) + 1
  attempt = math.min(attempt + 1, 4294967295)
  if state == 1 and #rest == 0 then
    rest = taken_over
  end
end
-- Counted first: what cannot be counted is not begun.
if most > 0 and not is_ours then
  redis.call('ZADD', records, now_ms + lease_ms + keep_ms, member)
  -- For longer than now is needed, so that this is not done each time.
  if redis.call('PTTL', records) < lease_ms + keep_ms then
    redis.call('PEXPIRE', records, 2 * (lease_ms + keep_ms))
  end
end
ends = now + lease_ms * 1000
stored = struct.pack('<BBI4I7I7I4', 1, 1, attempt, fence, ends, lease_ms) .. head .. token .. payload .. rest
redis.call('SET', record, stored, 'PX', lease_ms + keep_ms)
return {1, fence, attempt, payload, rest == taken_over and '' or rest}
