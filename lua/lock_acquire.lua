-- lock_acquire: grant the lease, or report how long the current holders may keep it.
--
-- KEYS[1]  lease   string, expires `keep_ms` after the last lease  prefix:2:{lock:<name>:<key>}:lease
-- ARGV[1]  claim   16 bytes token, random and new for each acquisition. Then 4 bytes each, little endian: ttl_ms, 10 to 86400000;
--          number of fences to reserve, 1 to 65536; keep_ms, how long the last fence is remembered after the leases, or four fifths of
--          that; permits, 1 to 1000. Then 1 byte kind, 1 or 2, and 7 bytes floor: granted fences are larger than this number, which is
--          below 2^53
--
-- Value    lease, numbers in little endian:
--            1 byte    kind of the holders: 1 exclusive, 2 semaphore; from the fair queue, see lock_queue: 3 exclusive, 4 reader, 5 writer,
--                      6 semaphore. 1 and 3, 2 and 6, and 4 and 5 are one kind of lock, and no two kinds are held together
--            7 bytes   last fence
--          and for each holder:
--            7 bytes   end of the lease in us; 0 for a lease that was released
--            4 bytes   length of the lease in ms
--            7 bytes   first fence
--            16 bytes  token
--          The expiry is written again unless the last grant was in the same fifth of keep_ms and no shorter. Each other write sets it to
--          keep_ms after the leases, so at least four fifths of keep_ms remain
-- Returns  granted: fence, the first of the holder's fences. Held by others: -remaining_ms, below 0. Held by a lock of another kind:
--          {held_as}, the byte of that kind
-- Errors   TOLLGATE if these scripts did not write the value; WRONGTYPE
-- Repeat   harmless: the token of a holder renews its lease and gets the same fences
local lease, claim = KEYS[1], ARGV[1]
local token, ttl_ms, fences, keep_ms, permits, kind, floor = struct.unpack('<c16I4I4I4I4BI7', claim)

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
-- The smallest fence by the clock and the floor. A granted fence is also larger than the last fence, if the value still has one.
local min_fence = floor < now and now or floor + 1
local stored = redis.call('GET', lease)
local held_as, fence, ends, length_ms, first = kind, 0, 0, 0, 0
if stored and #stored == 42 then
  held_as, fence, ends, length_ms, first = struct.unpack('<BI7I7I4I7', stored)
elseif stored then
  held_as = 0
end
-- The common cases: the lease is free, or one other token holds it and the claim has one permit. Neither case needs the list of holders.
if held_as >= 1 and held_as <= 6 then
  local remaining_us = ends - now
  if remaining_us <= 0 and fence < min_fence then
    local new_value = struct.pack('<BI7I7I4I7', kind, min_fence + fences - 1, now + ttl_ms * 1000, ttl_ms, min_fence) .. token
    -- The last grant was in this fifth of keep_ms by the clock, so the expiry is long enough.
    local keeps_expiry = first >= now - now % (keep_ms * 200) and length_ms >= ttl_ms and (ends == 0 or ends - length_ms * 1000 >= first)
    -- The user may lack the right to SETRANGE.
    if not keeps_expiry or type(redis.pcall('SETRANGE', lease, '0', new_value)) ~= 'number' then
      redis.call('SET', lease, new_value, 'PX', ttl_ms + keep_ms)
    end
    return min_fence
  elseif remaining_us > 0 and remaining_us <= length_ms * 1000 and permits == 1 and (held_as == kind or held_as == 3 * kind)
    and stored:sub(27) ~= token then
    return -math.ceil(remaining_us / 1000)
  end
end

held_as = stored:byte(1) or 0
if #stored < 8 or (#stored - 8) % 34 ~= 0 or held_as < 1 or held_as > 6 then
  return redis.error_reply('TOLLGATE the value does not hold leases of version 1')
end
fence, first = struct.unpack('<I7', stored, 2), nil
local others, soonest, latest, repaired = {}, nil, now, false
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
local is_other = #others > 0 and held_as ~= kind and held_as ~= 3 * kind
local granted, new_value = first or #others == 0 or (held_as == kind and #others < permits), ''
if granted then
  if not first then
    first = math.max(fence + 1, min_fence)
    fence = first + fences - 1
  end
  local ends = now + ttl_ms * 1000
  latest = math.max(latest, ends)
  new_value = struct.pack('<I7I4I7c16', ends, ttl_ms, first, token)
  held_as = kind
end
if granted or repaired then
  local value = struct.pack('<BI7', held_as, fence) .. table.concat(others) .. new_value
  redis.call('SET', lease, value, 'PX', math.ceil((latest - now) / 1000) + keep_ms)
end
if is_other then
  return {held_as}
end
return granted and first or -math.ceil((soonest - now) / 1000)
