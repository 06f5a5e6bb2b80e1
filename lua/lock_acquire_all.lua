-- lock_acquire_all: grant several leases, or none and report how long the current holders may keep them.
--
-- KEYS[1]  leases   strings, see lock_acquire; one key a lease, at most 128  prefix:2:{lock:<name>:<key>}:lease
-- ARGV[1]  ttl_ms   integer, 10 to 86400000
-- ARGV[2]  fences   how many fences to reserve for each, 1 to 65536
-- ARGV[3]  keep_ms  how long the last fence is remembered after the leases
-- ARGV[4]  floor    all granted fences are larger than this number, which is below 2^53
-- ARGV[5]  tokens   16 random bytes a lease, new for each acquisition
--
-- Value    leases: see lock_acquire
-- Returns  all granted: {1, first fence of each}. None granted: {0, remaining_ms of each, 0 if it is free}. None granted, since another
--          kind of lock holds some: {2, for each the byte of that kind, otherwise 0}
-- Errors   TOLLGATE if these scripts did not write a value; WRONGTYPE
-- Repeat   harmless: the tokens of the holders renew their leases and get the same fences
local leases, ttl_ms, fences, keep_ms, floor, tokens = KEYS, ARGV[1] + 0, ARGV[2] + 0, ARGV[3] + 0, ARGV[4] + 0, 4

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local min_fence = math.max(floor + 1, now)
local first, last, held, is_free, repaired, other = {}, {}, {0}, true, {}, {2}
local is_other = false
for i = 1, math.min(#leases, 128) do
  local token, stored = ARGV[tokens + i], redis.call('GET', leases[i])
  last[i], held[i + 1], other[i + 1] = 0, 0, 0
  if stored then
    local held_as = stored:byte(1) or 0
    if #stored < 8 or (#stored - 8) % 34 ~= 0 or held_as < 1 or held_as > 6 then
      return redis.error_reply('TOLLGATE the value does not hold leases of version 1')
    end
    last[i] = struct.unpack('<I7', stored, 2)
    local holders, latest, is_cut = {}, now, false
    -- One iteration for each holder.
    for at = 9, #stored, 34 do
      local ends, length_ms, its_first, holder = struct.unpack('<I7I4I7c16', stored, at)
      -- A lease that ends later than its length from now predates a clock step back.
      if ends - now > length_ms * 1000 then
        ends, is_cut = now + length_ms * 1000, true
      end
      if ends > now then
        holders[#holders + 1] = struct.pack('<I7I4I7c16', ends, length_ms, its_first, holder)
        latest = math.max(latest, ends)
      end
      if ends > now and holder == token then
        first[i] = its_first
      elseif ends > now then
        is_free = false
        if held_as ~= 1 and held_as ~= 3 then
          is_other, other[i + 1] = true, held_as
        end
        local remaining_ms = math.ceil((ends - now) / 1000)
        held[i + 1] = held[i + 1] == 0 and remaining_ms or math.min(held[i + 1], remaining_ms)
      end
    end
    if is_cut then
      repaired[i] = {stored:sub(1, 8) .. table.concat(holders), math.ceil((latest - now) / 1000) + keep_ms}
    end
  end
end
if not is_free then
  -- Store the shorter end, or the next caller would see the full length again.
  for i, value in pairs(repaired) do
    redis.call('SET', leases[i], value[1], 'PX', value[2])
  end
  return is_other and other or held
end
local granted = {1}
for i = 1, math.min(#leases, 128) do
  if not first[i] then
    -- Above the clock, in case the last fence was forgotten; above the last fence, in case the clock was set back.
    first[i] = math.max(last[i] + 1, min_fence)
    last[i] = first[i] + fences - 1
  end
  local new_value = struct.pack('<BI7I7I4I7c16', 1, last[i], now + ttl_ms * 1000, ttl_ms, first[i], ARGV[tokens + i])
  redis.call('SET', leases[i], new_value, 'PX', ttl_ms + keep_ms)
  granted[i + 1] = first[i]
end
return granted
