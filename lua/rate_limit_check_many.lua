-- rate_limit_check_many: the same as rate_limit_check_plain for several subjects that have nothing to do with each other, one after the
-- other: each is charged or not by itself. For decisions that are asked for at the same time, of which each would pay for a
-- call of its own. A subject may be there more than once.
--
-- KEYS[1]  keys     strings, at most 64 of them, see rate_limit_check    prefix:2:{rate_limit:<policy>:<subject>}:<shape>:counts
-- ARGV[1]  groups   for the subjects that are counted by one policy, as many times as there are policies, in the order of the keys:
--                   ttl_ms, format, layout, size and limits, see rate_limit_check_plain; the number of subjects; the cost of each
--
-- Value    counts: see rate_limit_check; their time to live is that of rate_limit_check_plain
-- Returns  for each key what rate_limit_check_plain returns, or an error that concerns this key alone
-- Errors   none of its own
-- Repeat   charges again: not to be resent after a lost reply
local keys, groups = KEYS, ARGV
local unpack_table = unpack
local call, pcall, pack, unpack, ceil = redis.call, redis.pcall, struct.pack, struct.unpack, math.ceil
local find = string.find
local HEADER, ONE_LIMIT = 4, 17
local TOKEN_BUCKET, FIXED_WINDOW, SLIDING_WINDOW = 1, 2, 3

local time = call('TIME')
local now = time[1] * 1000000 + time[2]
-- The first place of each key, since it may be there more than once; what it holds by now, how that is to be written, if it is,
-- and with which time to live.
local WITHIN, WHOLE, NEW = 1, 2, 3
local places, values, ways, lives = {}, call('MGET', unpack_table(keys)), {}, {}
local replies = {}

-- Whether the only limit has room, and its two or three counts with the cost in them.
local function charge(kind, span, step, capacity, cost, elapsed, a, b, c)
  if kind == TOKEN_BUCKET then
    local debt = b - elapsed * step
    if debt <= 0 then
      a, debt = now, 0
    end
    debt = debt + cost * span
    return debt <= capacity * span, a, debt
  elseif kind == FIXED_WINDOW then
    if b == 0 or now - a >= span then
      a, b = now, 0
    end
    b = b + cost
    return b <= capacity, a, b
  end
  local passed = now - a
  if passed >= span then
    a, b, c = a + span, passed < 2 * span and c or 0, 0
    passed = passed - span
  end
  if b + c == 0 then
    a, passed = now, 0
  end
  c = c + cost
  local faded = b > 0 and ceil(b * ceil((span - passed) / step) / ceil(span / step)) or 0
  return c + faded <= capacity, a, b, c
end

local n, at_group = 0, 1
while groups[at_group] do
  local ttl_ms, format, layout = groups[at_group], groups[at_group + 1], groups[at_group + 2]
  local size, limits, subjects = groups[at_group + 3] + 0, groups[at_group + 4], groups[at_group + 5] + 0
  local header, denied = #limits, pack('<BI7', 0, now)
  -- See rate_limit_check_plain.
  local since = now - now % (ttl_ms * 200)
  -- Algorithm, span, step and capacity of each limit. One limit is what most policies have, and needs no table.
  local kind, span, step, capacity = unpack(format, limits, HEADER + 1)
  local terms = header > HEADER + ONE_LIMIT and {unpack(format, limits, HEADER + 1)}
  for subject = 1, subjects do
    n = n + 1
    local cost = groups[at_group + 5 + subject]
    cost = cost == '1' and 1 or cost + 0
    local key = keys[n]
    local place = places[key]
    if not place then
      place = n
      places[key] = n
    end
    local value = values[place]
    local last, a, b, c, counts = 0, 0, 0, 0, nil
    if not value then
      if terms then
        -- Nothing but zeros says that nothing has been used.
        counts = {unpack(layout, limits .. string.rep('\0', size - header), header + 1)}
      end
    elseif #value ~= size or find(value, limits, 1, true) ~= 1 then
      last = nil
    elseif terms then
      counts = {unpack(layout, value, header + 1)}
      last = counts[1]
    else
      last, a, b, c = unpack(layout, value, header + 1)
    end
    if not last or last > now then
      replies[n] = ''
    else
      local elapsed, fits = now - last, true
      if terms then
        counts[1] = now
        local at = 2
        -- Behind the terms is where reading ended.
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
      else
        fits, a, b, c = charge(kind, span, step, capacity, cost, elapsed, a, b, c)
      end
      if fits then
        local charged = limits .. (terms and pack(layout, unpack_table(counts)) or pack(layout, now, a, b, c or 0))
        if not value then
          ways[place], lives[place] = NEW, ttl_ms
        elseif last < since then
          ways[place], lives[place] = WHOLE, ttl_ms
        else
          ways[place] = ways[place] or WITHIN
        end
        values[place], replies[n] = charged, charged
      else
        replies[n] = denied .. (value or '')
      end
    end
  end
  at_group = at_group + 6 + subjects
end

for at = 1, #keys do
  local key, way, done = keys[at], ways[at], true
  if way == WITHIN then
    done = pcall('SETRANGE', key, '0', values[at])
  elseif way == WHOLE then
    done = pcall('SET', key, values[at], 'PX', lives[at])
  elseif way == NEW then
    -- What is read as nothing may be something else than a string.
    done = pcall('SET', key, values[at], 'PX', lives[at], 'NX')
  end
  if not done or type(done) == 'table' and done.err then
    for other = at, #keys do
      if keys[other] == key then
        replies[other] = done or ''
      end
    end
  end
end
return replies
