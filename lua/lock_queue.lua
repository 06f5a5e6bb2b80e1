-- lock_queue: grant a lease in the order of arrival, or keep the position of a waiter in the queue.
--
-- Includes server_notify
-- KEYS[1]  lease        string, see lock_acquire                        prefix:2:{lock:<name>:<key>}:lease
-- KEYS[2]  queue        sorted set, kind and token by arrival in us; expires `position_ms` after the last call of a waiter  ...:queue
-- KEYS[3]  positions    sorted set, kind and token by when the position is lost in us; expires with the queue       ...:positions
-- KEYS[4]  channel      channel of the waiters                                                                      ...:free
-- ARGV[1]  token        16 random bytes, new for each acquisition
-- ARGV[2]  ttl_ms       integer, 10 to 86400000
-- ARGV[3]  fences       how many fences to reserve, 1 to 65536
-- ARGV[4]  keep_ms      how long the last fence is remembered after the leases
-- ARGV[5]  permits      holders of one kind at the same time, 1 to 1000
-- ARGV[6]  kind         3 exclusive, 4 reader, 5 writer, 6 semaphore
-- ARGV[7]  position_ms  how long a position is kept without a call of its waiter
-- ARGV[8]  max_queue    maximum length of the queue; 0 to not enter it
-- ARGV[9]  publish      PUBLISH, or SPUBLISH on a cluster
-- ARGV[10] floor        all granted fences are larger than this number, which is below 2^53
--
-- Value    lease: see lock_acquire; its first byte is the kind of the holders. queue, positions: the kind, 3 to 6, and the token
-- Returns  granted: {1, fence}, the first of the holder's fences. Queued: {2, remaining_ms, ahead}, the number of waiters ahead. Held or
--          awaited by others: {0, remaining_ms}. Queue full: {3, remaining_ms}. Held by a lock of another kind: {4, held_as}, the byte of
--          that kind; a queued waiter keeps its position
-- Errors   TOLLGATE if these scripts did not write the value; WRONGTYPE
-- Repeat   harmless: the token of a holder renews its lease and gets the same fences; a queued waiter keeps its position
local lease, queue, positions, channel, token = KEYS[1], KEYS[2], KEYS[3], KEYS[4], ARGV[1]
local ttl_ms, fences, keep_ms, permits, kind = ARGV[2] + 0, ARGV[3] + 0, ARGV[4] + 0, ARGV[5] + 0, ARGV[6]
local position_ms, max_queue, publish, floor = ARGV[7] + 0, ARGV[8] + 0, ARGV[9], ARGV[10] + 0

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local fence, first, others, soonest, latest, repaired = 0, nil, {}, nil, now, false
local held_as = 0
local stored = redis.call('GET', lease)
if stored then
  held_as = stored:byte(1) or 0
  if #stored < 8 or (#stored - 8) % 34 ~= 0 or held_as < 1 or held_as > 6 then
    return redis.error_reply('TOLLGATE the value does not hold leases of version 1')
  end
  fence = struct.unpack('<I7', stored, 2)
  -- One iteration for each holder.
  for at = 9, #stored, 34 do
    local ends, length_ms, its_first, holder = struct.unpack('<I7I4I7c16', stored, at)
    -- A lease that ends later than its length from now predates a clock step back.
    if ends - now > length_ms * 1000 then
      ends, repaired = now + length_ms * 1000, true
    end
    if ends > now and holder == token then
      first = its_first
    elseif ends > now then
      others[#others + 1] = struct.pack('<I7I4I7c16', ends, length_ms, its_first, holder)
      soonest, latest = math.min(soonest or ends, ends), math.max(latest, ends)
    end
  end
end

-- Remove waiters that did not call in time; the rest of them at the next call.
local expired = redis.call('ZRANGEBYSCORE', positions, '-inf', now, 'LIMIT', 0, 128)
if #expired > 0 then
  redis.call('ZREM', queue, unpack(expired))
  redis.call('ZREM', positions, unpack(expired))
end
local member = kind .. token
local head = redis.call('ZRANGE', queue, 0, 0)[1]
local until_us = head and head ~= member and (redis.call('ZSCORE', positions, head) or math.huge)
if until_us and until_us - now > position_ms * 1000 then
  -- The clock was set back, or the position was evicted. The waiters behind it may be affected as well, and dead ones must not delay the
  -- queue one after the other. Of the first 128 waiters, restore missing positions and shorten excessive ones.
  local restored = {}
  for _, waiting in ipairs(redis.call('ZRANGE', queue, 0, 127)) do
    restored[#restored + 1] = now + position_ms * 1000
    restored[#restored + 1] = waiting
  end
  redis.call('ZADD', positions, 'LT', unpack(restored))
  redis.call('PEXPIRE', positions, position_ms)
end

local has_room = #others == 0 or (held_as == kind + 0 and #others < permits)
local granted, own_lease = first or (has_room and (not head or head == member)), ''
if granted then
  if not first then
    -- Above the clock, in case the last fence was forgotten; above the last fence, in case the clock was set back.
    first = math.max(fence + 1, floor + 1, now)
    fence = first + fences - 1
  end
  local ends = now + ttl_ms * 1000
  latest = math.max(latest, ends)
  own_lease = struct.pack('<I7I4I7c16', ends, ttl_ms, first, token)
  held_as = kind + 0
end
if granted or repaired then
  local value = struct.pack('<BI7', held_as, fence) .. table.concat(others) .. own_lease
  redis.call('SET', lease, value, 'PX', math.ceil((latest - now) / 1000) + keep_ms)
end
if granted then
  if head then
    redis.call('ZREM', queue, member)
    redis.call('ZREM', positions, member)
    head = redis.call('ZRANGE', queue, 0, 0)[1]
    if head and head:sub(1, 1) == kind and #others + 1 < permits then
      -- The next waiter has room as well.
      notify(publish, channel, head:sub(2))
    end
  end
  return {1, first}
end

local is_rw = kind == '4' or kind == '5'
local is_same_lock_kind = held_as == kind + 0 or 3 * held_as == kind + 0 or (is_rw and (held_as == 4 or held_as == 5))
if #others > 0 and not is_same_lock_kind then
  return {4, held_as}
end
local remaining_ms = soonest and math.ceil((soonest - now) / 1000) or 0
if max_queue == 0 then
  return {0, remaining_ms}
end
local ahead = redis.call('ZRANK', queue, member)
if not ahead then
  ahead = redis.call('ZCARD', queue)
  if ahead >= max_queue then
    return {3, remaining_ms}
  end
  local last = redis.call('ZRANGE', queue, -1, -1, 'WITHSCORES')[2]
  redis.call('ZADD', queue, math.max(now, (last or 0) + 1), member)
end
redis.call('ZADD', positions, now + position_ms * 1000, member)
redis.call('PEXPIRE', queue, position_ms)
redis.call('PEXPIRE', positions, position_ms)
return {2, remaining_ms, ahead}
