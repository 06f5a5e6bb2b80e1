-- rate_limit_check_many: the same as rate_limit_check_plain for several subjects that have nothing to do with each other, one after the
-- other: each is charged or not by itself. For decisions that are asked for at the same time, of which each would pay for a
-- call of its own. A subject may be there more than once.
--
-- KEYS[1]  keys     strings, at most 64 of them, see rate_limit_check    prefix:2:{rate_limit:<policy>:<subject>}:<shape>:counts
-- ARGV[1]  groups   for the subjects that are counted by one policy, as many times as there are policies, in the order of the keys:
--                   ttl_ms, format, layout, size and limits, see rate_limit_check_plain; the number of subjects; the cost of each
--
-- Value    counts: see rate_limit_check
-- Returns  for each key what rate_limit_check_plain returns, or an error that concerns this key alone
-- Errors   none of its own
-- Repeat   charges again: not to be resent after a lost reply
local keys, groups = KEYS, ARGV
local unpack_table = unpack
local call, pcall, pack, unpack, ceil = redis.call, redis.pcall, struct.pack, struct.unpack, math.ceil
local TOKEN_BUCKET, FIXED_WINDOW = 1, 2

local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local stored = call('MGET', unpack_table(keys))
-- What each key holds by now, the subject that was charged to it last, and its time to live.
local values, last, lives, replies = {}, {}, {}, {}

local n, at_group = 0, 1
while groups[at_group] do
  local ttl_ms, format, layout = groups[at_group], groups[at_group + 1], groups[at_group + 2]
  local size, limits, subjects = groups[at_group + 3] + 0, groups[at_group + 4], groups[at_group + 5] + 0
  local header, denied = #limits, pack('<BI7', 0, now)
  local terms = {unpack(format, limits, 5)}
  for subject = 1, subjects do
    n = n + 1
    local key, cost = keys[n], groups[at_group + 5 + subject] + 0
    local value = values[key] or stored[n]
    local counts
    if not value then
      -- Nothing but zeros says that nothing has been used.
      counts = {unpack(layout, limits .. string.rep('\0', size - header), header + 1)}
    elseif #value == size and value:find(limits, 1, true) == 1 then
      counts = {unpack(layout, value, header + 1)}
    end
    local elapsed = counts and now - counts[1] or -1
    if elapsed < 0 then
      replies[n] = ''
    else
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
            local step = terms[i + 2]
            fits = fits and used + ceil(previous * ceil((span - passed) / step) / ceil(span / step)) <= capacity
          else
            fits = fits and used <= capacity
          end
          counts[at], counts[at + 1], counts[at + 2] = start, previous, used
          at = at + 3
        end
      end
      if fits then
        value = limits .. pack(layout, unpack_table(counts))
        values[key], last[key], lives[key], replies[n] = value, n, ttl_ms, value
      else
        replies[n] = denied .. (value or '')
      end
    end
  end
  at_group = at_group + 6 + subjects
end

for n = 1, #keys do
  local key = keys[n]
  if last[key] == n then
    local done
    if stored[n] then
      done = pcall('SET', key, values[key], 'PX', lives[key])
    else
      -- What is read as nothing may be something else than a string.
      done = pcall('SET', key, values[key], 'PX', lives[key], 'NX')
    end
    if not done or done.err then
      for other = 1, n do
        if keys[other] == key then
          replies[other] = done or ''
        end
      end
    end
  end
end
return replies
