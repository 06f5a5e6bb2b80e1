-- lock_acquire: take a lease if there is one to be had, or say for how long the holders may keep theirs.
--
-- KEYS[1]  lease   string, expires `keep_ms` after the last lease  prefix:2:{lock:<namespace>:<subject>}:lease
-- ARGV[1]  claim   the 16 bytes of the token, random and others for each acquisition, then 4 bytes each, little endian: ttl_ms, 10 to 86400000;
--          how many fencing tokens to set aside, 1 to 65536; keep_ms, how long the last fence is remembered after the leases, or
--          four fifths of that; how many may hold a lease at the same time, 1 to 1000; then 1 byte kind, 1 or 2, and 7 bytes floor: all
--          fences that are granted are larger than this number, which is below 2^53
--
-- Value    lease: 1 byte the kind of its holders: 1 exclusive, 2 semaphore, and by those who stood in line (see lock_line) 3 exclusive, 4 reader,
--          5 writer, 6 semaphore; 1 and 3, 2 and 6, and 4 and 5 are of one kind of lock, and never held beside another. Then
--          7 bytes the last fence that was given out, then for each holder 7 bytes the end of the lease in us, 4 bytes its
--          length in ms, 7 bytes its first fence, little endian, and the 16 bytes of its token. One that ends at 0 was given back. Its time
--          to live is not written again where the last grant was in the same fifth of `keep_ms` and no shorter than this one: every
--          other write gives it `keep_ms` after the leases, and all scripts are given the same, so at least four fifths of that are left
-- Returns  fence granted: the fences from this one on are the holder's; -remaining_ms, less than 0, held by others; {held_as} held by a lock of
--          another kind, of which this is the byte
-- Errors   TOLLGATE if the value was not written by these scripts; WRONGTYPE
-- Repeat   harmless: with the token of a holder its lease is made to last its whole length again, with the same fences
local lease, claim = KEYS[1], ARGV[1]
local token, ttl_ms, fences, keep_ms, permits, kind, floor = struct.unpack('<c16I4I4I4I4BI7', claim)

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
-- The smallest fence that may be granted. The clock alone would do, were it never set back; the last fence alone would do, were it never forgotten.
local least = floor < now and now or floor + 1
local stored = redis.call('GET', lease)
local held_as, fence, ends, length_ms, first = kind, 0, 0, 0, 0
if stored and #stored == 42 then
  held_as, fence, ends, length_ms, first = struct.unpack('<BI7I7I4I7', stored)
elseif stored then
  held_as = 0
end
-- Nearly always nobody else holds a lease, or one does and nobody may beside it: nothing of what is stored has to be kept.
if held_as >= 1 and held_as <= 6 then
  local left = ends - now
  if left <= 0 and fence < least then
    local mine = struct.pack('<BI7I7I4I7', kind, least + fences - 1, now + ttl_ms * 1000, ttl_ms, least) .. token
    -- Granted in this fifth, by the clock and not ahead of it, which is when its time to live was written or was known to be long enough.
    local lives = first >= now - now % (keep_ms * 200) and length_ms >= ttl_ms and (ends == 0 or ends - length_ms * 1000 >= first)
    -- A user may have no right to write into it.
    if not lives or type(redis.pcall('SETRANGE', lease, '0', mine)) ~= 'number' then
      redis.call('SET', lease, mine, 'PX', ttl_ms + keep_ms)
    end
    return least
  elseif left > 0 and left <= length_ms * 1000 and permits == 1 and (held_as == kind or held_as == 3 * kind)
    and stored:sub(27) ~= token then
    return -math.ceil(left / 1000)
  end
end

held_as = stored:byte(1) or 0
if #stored < 8 or (#stored - 8) % 34 ~= 0 or held_as < 1 or held_as > 6 then
  return redis.error_reply('TOLLGATE the value does not hold leases of version 1')
end
fence, first = struct.unpack('<I7', stored, 2), nil
local others, soonest, latest, repaired = {}, nil, now, false
-- As many turns as there are holders.
for at = 9, #stored, 34 do
  local ends, length_ms, its_first, holder = struct.unpack('<I7I4I7c16', stored, at)
  -- A lease that would last longer than it is long was written before the clock was set back.
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
local granted, mine = first or #others == 0 or (held_as == kind and #others < permits), ''
if granted then
  if not first then
    first = math.max(fence + 1, least)
    fence = first + fences - 1
  end
  local ends = now + ttl_ms * 1000
  latest = math.max(latest, ends)
  mine = struct.pack('<I7I4I7c16', ends, ttl_ms, first, token)
  held_as = kind
end
if granted or repaired then
  local value = struct.pack('<BI7', held_as, fence) .. table.concat(others) .. mine
  redis.call('SET', lease, value, 'PX', math.ceil((latest - now) / 1000) + keep_ms)
end
if is_other then
  return {held_as}
end
return granted and first or -math.ceil((soonest - now) / 1000)
