-- rate_limit_check_plain: the same as rate_limit_check for what is asked nearly always, in less time: charge one subject to its
-- limits, none of which is a sliding log, if all of them have room. What is out of the ordinary is left to that script.
--
-- KEYS[1]  key      string, see rate_limit_check    prefix:2:{rate_limit:<policy>:<subject>}:<shape>:counts
-- ARGV[1]  request  little endian: 4 bytes cost, 1 to the smallest capacity; 6 bytes ttl_ms, a quarter longer than the counts say
--                   something after they were written, at the most; 2 bytes length of the packed value, 2 bytes length of limits;
--                   then terms and limits, see rate_limit_check. All in one, since an argument more takes longer than to read all of this
--
-- Value    counts: see rate_limit_check. Their time to live is written once in a fifth of it, counted from 1970, since that takes longer
--          than all the rest; until the next time they live for four fifths of it at least, which is what they need
-- Returns  the last update, which is the clock, and the counts as they are stored now, if the request was admitted; 1 byte 0, 7 bytes
--          clock and the packed value, if it was denied; an empty string if the key is blocked, was counted with other numbers, or
--          holds something else, or the clock was set back: nothing was done then, and rate_limit_check is to be asked
-- Errors   WRONGTYPE
-- Repeat   charges again: not to be resent after a lost reply
local call, pack, unpack = redis.call, struct.pack, struct.unpack
local key, request = KEYS[1], ARGV[1]
local TOKEN_BUCKET, FIXED_WINDOW = 1, 2
-- How long `limits` are of a policy with one limit, which is what most have.
local BUCKET_ALONE, WINDOW_ALONE = 17, 5

-- Of the first limit; `terms` is where those of the next one begin.
local cost, ttl_ms, size, length, kind, span, step, capacity, terms = unpack('<I4I6I2I2BI7I5I4', request)
local limits = request:sub(-length)
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local stored = call('GET', key)
local value = stored
if not stored then
  -- Nothing but zeros says that nothing has been used.
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

-- `a`, `b` and `c` are the two or three numbers of a limit, and `at` is where those of the next one begin.
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
  -- To make text of a number takes as long as most of the above.
  call('SETRANGE', key, length == BUCKET_ALONE and '17' or length == WINDOW_ALONE and '5' or length, charged)
end
return charged
