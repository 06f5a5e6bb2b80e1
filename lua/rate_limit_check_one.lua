-- rate_limit_check_one: the same as rate_limit_check for what is asked nearly always, in less time: charge one subject to its only
-- limit, which is no sliding log, if it has room. What is out of the ordinary is left to that script.
--
-- KEYS[1]  counts    string, see rate_limit_check    prefix:2:{rate_limit:<policy>:<subject>}:<shape>:counts
-- ARGV[1]  ttl_ms    how long the counts say something after they were written, at the most
-- ARGV[2]  cost      integer, 1 to capacity
-- ARGV[3]  limits    version and terms of the limit, which is also how the packed value begins
-- ARGV[4]  span      the terms once more, as text: us, or for a token bucket what a token is worth
-- ARGV[5]  step      us, or for a token bucket what flows in per us
-- ARGV[6]  capacity  integer
--
-- Value    counts: see rate_limit_check
-- Returns  the counts as they are stored now, if the request was admitted; 1 byte 0, 7 bytes clock and the counts, if it was denied;
--          an empty string if the key is blocked, was counted with other numbers, or holds something else, or the
--          clock was set back: nothing was done then, and rate_limit_check is to be asked
-- Errors   WRONGTYPE
-- Repeat   charges again: not to be resent after a lost reply
local call, pack, unpack = redis.call, struct.pack, struct.unpack
local counts, ttl_ms, cost, limits = KEYS[1], ARGV[1], ARGV[2] + 0, ARGV[3]
local span, step, capacity = ARGV[4] + 0, ARGV[5] + 0, ARGV[6] + 0
local TOKEN_BUCKET, FIXED_WINDOW = 1, 2

local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local value = call('GET', counts)
local at, kind = #limits + 1, limits:byte(5)
-- The last update and the numbers of the count.
local size = kind == TOKEN_BUCKET and 21 or kind == FIXED_WINDOW and 19 or 24
if value and (#value ~= #limits + size or value:find(limits, 1, true) ~= 1) then
  return ''
end

local fits, packed
if kind == TOKEN_BUCKET then
  local last, since, debt = now, now, 0
  if value then
    last, since, debt = unpack('<I7I7I7', value, at)
    debt = debt - (now - last) * step
    if debt <= 0 then
      since, debt = now, 0
    end
  end
  debt = debt + cost * span
  fits = debt <= capacity * span
  if last > now then
    return ''
  end
  packed = fits and pack('<I7I7I7', now, since, debt)
elseif kind == FIXED_WINDOW then
  local last, start, used = now, now, 0
  if value then
    last, start, used = unpack('<I7I7I5', value, at)
    if used == 0 or now - start >= span then
      start, used = now, 0
    end
  end
  used = used + cost
  fits = used <= capacity
  if last > now then
    return ''
  end
  packed = fits and pack('<I7I7I5', now, start, used)
else
  local last, start, previous, used = now, now, 0, 0
  if value then
    last, start, previous, used = unpack('<I7I7I5I5', value, at)
    local elapsed = now - start
    if elapsed >= span and elapsed < 2 * span then
      start, previous, used = start + span, used, 0
    elseif elapsed >= span then
      previous, used = 0, 0
    end
    if previous + used == 0 then
      start = now
    end
  end
  local ceil = math.ceil
  used = used + cost
  fits = used + ceil(previous * ceil((span - (now - start)) / step) / ceil(span / step)) <= capacity
  if last > now then
    return ''
  end
  packed = fits and pack('<I7I7I5I5', now, start, previous, used)
end
if not fits then
  return pack('<BI7', 0, now) .. (value or '')
end
packed = limits .. packed
call('SET', counts, packed, 'PX', ttl_ms)
return packed
