-- rate_limit_check_plain: the fast path of rate_limit_check. It charges one descriptor to its limits, none of which is a sliding log,
-- if all of them have room. All other cases are left to rate_limit_check.
--
-- KEYS[1]  key      string, see rate_limit_check    prefix:2:{rate_limit:<policy>:<subject>}:<shape>:counts
-- ARGV[1]  request  little endian: 4 bytes cost, 1 to the smallest capacity; 6 bytes ttl_ms, a quarter longer than the counts matter
--                   after a write, at most; 2 bytes length of the packed value, 2 bytes length of limits; then terms and limits, see
--                   rate_limit_check. One argument, because another one costs more time than reading all of these
--
-- Value    counts: see rate_limit_check. The expiry is written once in a fifth of ttl_ms, counted from 1970, because that takes longer
--          than the rest of the script. Four fifths remain until the next write, which is as long as the counts matter
-- Returns  admitted: the last update, which is the clock, and the stored counts. Denied: 1 byte 0, 7 bytes clock and the packed value.
--          An empty string, with nothing changed, if the key is blocked, has another quota or foreign data, or the clock was set back:
--          call rate_limit_check
-- Errors   WRONGTYPE
-- Repeat   charges again: never resend after a lost reply
local call, pack, unpack = redis.call, struct.pack, struct.unpack
local key, request = KEYS[1], ARGV[1]
local TOKEN_BUCKET, FIXED_WINDOW = 1, 2
-- Length of `limits` for a policy with one limit, the most common case.
local BUCKET_ALONE, WINDOW_ALONE = 17, 5

-- The first limit. `terms` is the position of the next one.
local cost, ttl_ms, size, length, kind, span, step, capacity, terms = unpack('<I4I6I2I2BI7I5I4', request)
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
  frame, last, a, b, c = unpack(kind > FIXED_WINDOW and '<c5dddd' or '<c5ddd', value)
elseif length == BUCKET_ALONE and terms > #request - length then
  frame, last, a, b = unpack('<c17ddd', value)
else
  frame = value:sub(1, length)
  last, a, b, c = unpack(kind > FIXED_WINDOW and '<dddd' or '<ddd', value, length + 1)
end
if frame ~= limits or last > now then
  return ''
end

-- `a`, `b` and `c` are the two or three numbers of a limit. `at` is the position of the next ones.
local fits, charged, at = true, nil, length + 9
while true do
  local is_sliding = kind > FIXED_WINDOW
  if kind == TOKEN_BUCKET then
    local debt = b - (now - last) * step
    if debt <= 0 then
      a, debt = now, 0
    end
    b = debt + cost * span
    fits = fits and b <= capacity * span
  elseif not is_sliding then
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
      local ceil = math.ceil
      used = used + ceil(b * ceil((span - passed) / step) / ceil(span / step))
    end
    fits = fits and used <= capacity
  end
  if charged then
    charged = charged .. (is_sliding and pack('<ddd', a, b, c) or pack('<dd', a, b))
  else
    charged = is_sliding and pack('<dddd', now, a, b, c) or pack('<ddd', now, a, b)
  end
  if terms > #request - length then
    break
  end
  at = at + (is_sliding and 24 or 16)
  kind, span, step, capacity, terms = unpack('<BI7I5I4', request, terms)
  a, b, c = unpack(kind > FIXED_WINDOW and '<ddd' or '<dd', value, at)
end
if not fits then
  return pack('<BI7', 0, now) .. (stored or '')
end
if not stored or last < now - now % (ttl_ms * 200) then
  call('SET', key, limits .. charged, 'PX', ttl_ms)
else
  -- Converting a number to text takes as long as most of the code above.
  call('SETRANGE', key, length == BUCKET_ALONE and '17' or length == WINDOW_ALONE and '5' or length, charged)
end
return charged
