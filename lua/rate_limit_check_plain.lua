-- rate_limit_check_plain: the fast path of rate_limit_check. It charges one descriptor to its limits if all of them have room, and denies
-- it otherwise. No limit is a sliding log. All other cases are left to rate_limit_check.
--
-- Includes rate_limit_refill, rate_limit_fade
-- KEYS[1]  key      string, see rate_limit_check    prefix:2:{rate_limit:<policy>:<key>}:<shape>:counts
-- ARGV[1]  request  little endian: 7 bytes cost, 1 to the smallest capacity; 6 bytes ttl_ms, a quarter longer than the counts matter
--                   after a write, at most; 2 bytes length of the packed value, 2 bytes length of limits; then params and limits, see
--                   rate_limit_check. One argument, because another one costs more time than reading all of these
--
-- Value    counts: see rate_limit_check. The expiry is written once in a fifth of ttl_ms, counted from 1970, because that takes longer
--          than the rest of the script. After each charge at least four fifths remain, which is as long as the counts matter
-- Returns  admitted: the last update, which is the clock, and the stored counts. Denied: 1 byte 0, 7 bytes clock and the packed value.
--          An empty string, with nothing changed, if the key is blocked, has another quota or foreign data, or the clock was set back:
--          call rate_limit_check
-- Errors   WRONGTYPE
-- Repeat   charges again: never resend after a lost reply
local call, pack, unpack = redis.call, struct.pack, struct.unpack
local key, request = KEYS[1], ARGV[1]
local TOKEN_BUCKET, FIXED_WINDOW = 1, 2
-- Length of `limits` for a policy with one limit, the most common case.
local BUCKET_ALONE, WINDOW_ALONE = 26, 8

-- The first limit. `next_limit` is the position of the next one.
local cost, ttl_ms, size, length, kind, span, step, parts, capacity, next_limit = unpack('<I7I6I2I2BI7I7I4I7', request)
local limits = request:sub(-length)
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local stored = call('GET', key)
local value = stored
if not stored then
  -- Zeros mean that no unit was used.
  value = limits .. string.rep('\0', size - length)
elseif #stored ~= size then
  return ''
end
local frame, last, a, b, c
if length == WINDOW_ALONE then
  frame, last, a, b, c = unpack(kind == FIXED_WINDOW and '<c8ddd' or '<c8dddd', value)
elseif length == BUCKET_ALONE and next_limit > #request - length then
  frame, last, a, b, c = unpack('<c26dddd', value)
else
  frame = value:sub(1, length)
  last, a, b, c = unpack(kind == FIXED_WINDOW and '<ddd' or '<dddd', value, length + 1)
end
if frame ~= limits or last > now then
  return ''
end

-- `a`, `b` and `c` are the two or three numbers of a limit. `at` is their position in the value.
local fits, charged, at = true, nil, length + 9
while true do
  local has_three = kind ~= FIXED_WINDOW
  if kind == TOKEN_BUCKET then
    b, c = refilled(b, c, now - last, step, parts)
    if b < 0 or b + c == 0 then
      a, b, c = now, 0, 0
    end
    b = b + cost * span
    fits = fits and (c > 0 and b + 1 or b) <= capacity * span
  elseif not has_three then
    if b == 0 or now - a >= span then
      a, b = now, 0
    end
    b = b + cost
    fits = fits and b <= capacity
  else
    local passed = now - a
    if passed >= span then
      a, b, c = a + span, passed < 2 * span and c or 0, 0
      passed = passed - span
    end
    if b + c == 0 then
      a, passed = now, 0
    end
    c = c + cost
    local used = c
    if b > 0 then
      used = used + faded(b, math.ceil((span - passed) / step), math.ceil(span / step))
    end
    fits = fits and used <= capacity
  end
  if charged then
    charged = charged .. (has_three and pack('<ddd', a, b, c) or pack('<dd', a, b))
  else
    charged = has_three and pack('<dddd', now, a, b, c) or pack('<ddd', now, a, b)
  end
  if next_limit > #request - length then
    break
  end
  at = at + (has_three and 24 or 16)
  kind, span, step, parts, capacity, next_limit = unpack('<BI7I7I4I7', request, next_limit)
  a, b, c = unpack(kind == FIXED_WINDOW and '<dd' or '<ddd', value, at)
end
if not fits then
  return pack('<BI7', 0, now) .. (stored or '')
end
if not stored or last < now - now % (ttl_ms * 200) then
  call('SET', key, limits .. charged, 'PX', ttl_ms)
else
  -- Converting a number to text takes as long as most of the code above.
  call('SETRANGE', key, length == BUCKET_ALONE and '26' or length == WINDOW_ALONE and '8' or length, charged)
end
return charged
