-- rate_limit_check_plain: the same as rate_limit_check for what is asked nearly always, in less time: charge one subject to its
-- limits, none of which is a sliding log, if all of them have room. What is out of the ordinary is left to that script.
--
-- KEYS[1]  key      string, see rate_limit_check    prefix:2:{rate_limit:<policy>:<subject>}:<shape>:counts
-- ARGV[1]  ttl_ms   a quarter longer than the counts say something after they were written, at the most
-- ARGV[2]  cost     integer, 1 to the smallest capacity
-- ARGV[3]  format   how the terms in `limits` are read, for struct.unpack
-- ARGV[4]  layout   how the last update and the counts are read and written, for struct.pack
-- ARGV[5]  size     the length of the packed value
-- ARGV[6]  limits   version and terms of the limits, which is also how the packed value begins
--
-- Value    counts: see rate_limit_check. Their time to live is written once in a fifth of it, counted from 1970, since that takes longer
--          than all the rest; until the next time they live for four fifths of it at least, which is what they need
-- Returns  the counts as they are stored now, if the request was admitted; 1 byte 0, 7 bytes clock and the counts, if it was denied;
--          an empty string if the key is blocked, was counted with other numbers, or holds something else, or the
--          clock was set back: nothing was done then, and rate_limit_check is to be asked
-- Errors   WRONGTYPE
-- Repeat   charges again: not to be resent after a lost reply
local unpack_table = unpack
local call, pack, unpack = redis.call, struct.pack, struct.unpack
local key, ttl_ms, cost, format, layout, limits = KEYS[1], ARGV[1], ARGV[2] + 0, ARGV[3], ARGV[4], ARGV[6]
local size = ARGV[5] + 0
local TOKEN_BUCKET, FIXED_WINDOW = 1, 2

local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local stored = call('GET', key)
local value = stored
if not stored then
  -- Nothing but zeros says that nothing has been used.
  value = limits .. string.rep('\0', size - #limits)
elseif #stored ~= size or stored:find(limits, 1, true) ~= 1 then
  return ''
end
local terms, counts = {unpack(format, limits, 5)}, {unpack(layout, value, #limits + 1)}
local elapsed = now - counts[1]
if elapsed < 0 then
  return ''
end
local last = counts[1]
counts[1] = now

local at, fits = 2, true
-- Algorithm, span, step and capacity of each limit; behind them is where reading ended.
for i = 1, #terms - 1, 4 do
  local kind, span, capacity = terms[i], terms[i + 1], terms[i + 3]
  if kind == TOKEN_BUCKET then
    local debt = counts[at + 1] - elapsed * terms[i + 2]
    if debt <= 0 then
      counts[at], debt = now, 0
    end
    debt = debt + cost * span
    fits = fits and debt <= capacity * span
    counts[at + 1] = debt
    at = at + 2
  elseif kind == FIXED_WINDOW then
    local used = counts[at + 1]
    if used == 0 or now - counts[at] >= span then
      counts[at], used = now, 0
    end
    used = used + cost
    fits = fits and used <= capacity
    counts[at + 1] = used
    at = at + 2
  else
    local start, previous, used = counts[at], counts[at + 1], counts[at + 2]
    local passed = now - start
    if passed >= span then
      start, previous, used = start + span, passed < 2 * span and used or 0, 0
      passed = passed - span
    end
    if previous + used == 0 then
      start, passed = now, 0
    end
    used = used + cost
    if previous > 0 then
      local ceil, step = math.ceil, terms[i + 2]
      fits = fits and used + ceil(previous * ceil((span - passed) / step) / ceil(span / step)) <= capacity
    else
      fits = fits and used <= capacity
    end
    counts[at], counts[at + 1], counts[at + 2] = start, previous, used
    at = at + 3
  end
end
if not fits then
  return pack('<BI7', 0, now) .. (stored or '')
end
value = limits .. pack(layout, unpack_table(counts))
if last < now - now % (ttl_ms * 200) then
  call('SET', key, value, 'PX', ttl_ms)
else
  call('SETRANGE', key, 0, value)
end
return value
