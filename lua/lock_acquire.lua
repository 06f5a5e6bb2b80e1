-- lock_acquire: take a lease if there is one to be had, or say how long the holders may keep theirs.
--
-- KEYS[1]  lease    string, expires `keep_ms` after the last lease  prefix:2:{lock:<namespace>:<subject>}:lease
-- ARGV[1]  token    16 random bytes, others for each acquisition
-- ARGV[2]  ttl_ms   integer, 10 to 86400000
-- ARGV[3]  fences   how many fencing tokens to set aside, 1 to 65536
-- ARGV[4]  keep_ms  how long the last fence is remembered after the leases
-- ARGV[5]  permits  how many may hold a lease at the same time, 1 to 1000
--
-- Value    lease: 1 byte how it is held, 1 by whoever came at the right moment, 2 or 3 by those who stood in line (see lock_line), and
--          7 bytes the last fence that was given out, then for each holder 7 bytes the end of the lease in us, 4 bytes its
--          length in ms, 7 bytes its first fence, little endian, and the 16 bytes of its token. One that ends at 0 was given back
-- Returns  {1, fence} granted: the fences from this one on are the holder's; {0, remaining_ms} held by others
-- Errors   TOLLGATE if the value was not written by these scripts; WRONGTYPE
-- Repeat   harmless: with the token of a holder its lease is made to last its whole length again, with the same fences
local lease, token, ttl_ms, fences, keep_ms = KEYS[1], ARGV[1], ARGV[2] + 0, ARGV[3] + 0, ARGV[4] + 0
local permits = ARGV[5] + 0

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local fence, first, others, soonest, latest, repaired = 0, nil, {}, nil, now, false
local held_as = 1
local stored = redis.call('GET', lease)
if stored then
  held_as = stored:byte(1) or 0
  if #stored < 8 or (#stored - 8) % 34 ~= 0 or held_as < 1 or held_as > 3 then
    return redis.error_reply('TOLLGATE the value does not hold leases of version 1')
  end
  fence = struct.unpack('<I7', stored, 2)
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
if granted then
  return {1, first}
end
return {0, math.ceil((soonest - now) / 1000)}
