-- lock_acquire: take a lease if there is one to be had, or say for how long the holders may keep theirs.
--
-- KEYS[1]  lease   string, expires `keep_ms` after the last lease  prefix:2:{lock:<namespace>:<subject>}:lease
-- ARGV[1]  claim   the 16 bytes of the token, random and others for each acquisition, then 4 bytes each, little endian: ttl_ms, 10 to 86400000;
--          how many fencing tokens to set aside, 1 to 65536; keep_ms, how long the last fence is remembered after the leases, or
--          four fifths of that; how many may hold a lease at the same time, 1 to 1000
--
-- Value    lease: 1 byte how it is held, 1 by whoever came at the right moment, 2 or 3 by those who stood in line (see lock_line), and
--          7 bytes the last fence that was given out, then for each holder 7 bytes the end of the lease in us, 4 bytes its
--          length in ms, 7 bytes its first fence, little endian, and the 16 bytes of its token. One that ends at 0 was given back. Its time
--          to live is not written again where the last grant was in the same fifth of `keep_ms` and no shorter than this one: every
--          other write gives it `keep_ms` after the leases, and all scripts are given the same, so at least four fifths of that are left
-- Returns  fence granted: the fences from this one on are the holder's; -remaining_ms, less than 0, held by others
-- Errors   TOLLGATE if the value was not written by these scripts; WRONGTYPE
-- Repeat   harmless: with the token of a holder its lease is made to last its whole length again, with the same fences
local lease, claim = KEYS[1], ARGV[1]
local token, ttl_ms, fences, keep_ms, permits = struct.unpack('<c16I4I4I4I4', claim)

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local stored = redis.call('GET', lease)
local held_as, fence, ends, length_ms, first = 1, 0, 0, 0, 0
if stored and #stored == 42 then
  held_as, fence, ends, length_ms, first = struct.unpack('<BI7I7I4I7', stored)
elseif stored then
  held_as = 0
end
-- Nearly always nobody else holds a lease, or one does and nobody may beside it: nothing of what is stored has to be kept.
if held_as >= 1 and held_as <= 3 then
  local left = ends - now
  if left <= 0 and fence < now then
    local mine = struct.pack('<BI7I7I4I7', 1, now + fences - 1, now + ttl_ms * 1000, ttl_ms, now) .. token
    -- Granted in this fifth, by the clock and not ahead of it, which is when its time to live was written or was known to be long enough.
    local lives = first >= now - now % (keep_ms * 200) and length_ms >= ttl_ms and (ends == 0 or ends - length_ms * 1000 >= first)
    -- A user may have no right to write into it.
    if not lives or type(redis.pcall('SETRANGE', lease, '0', mine)) ~= 'number' then
      redis.call('SET', lease, mine, 'PX', ttl_ms + keep_ms)
    end
    return now
  elseif left > 0 and left <= length_ms * 1000 and permits == 1 and stored:sub(27) ~= token then
    return -math.ceil(left / 1000)
  end
end

held_as = stored:byte(1) or 0
if #stored < 8 or (#stored - 8) % 34 ~= 0 or held_as < 1 or held_as > 3 then
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
local granted, mine = first or #others == 0 or (held_as == 1 and #others < permits), ''
if granted then
  if not first then
    -- The clock alone would do, were it never set back; the last fence alone would do, were it never forgotten.
    first = math.max(fence + 1, now)
    fence = first + fences - 1
  end
  local ends = now + ttl_ms * 1000
  latest = math.max(latest, ends)
  mine = struct.pack('<I7I4I7c16', ends, ttl_ms, first, token)
  held_as = 1
end
if granted or repaired then
  local value = struct.pack('<BI7', held_as, fence) .. table.concat(others) .. mine
  redis.call('SET', lease, value, 'PX', math.ceil((latest - now) / 1000) + keep_ms)
end
return granted and first or -math.ceil((soonest - now) / 1000)
