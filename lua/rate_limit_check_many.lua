-- rate_limit_check_many: the same as rate_limit_check_plain for several subjects that have nothing to do with each other, one after the
-- other: each is charged or not by itself. For decisions that are asked for at the same time, of which each would pay for a
-- call of its own. A subject may be there more than once, with nothing in between, and once more in another group.
--
-- KEYS[1]  keys     strings, at most 64 of them, see rate_limit_check    prefix:2:{rate_limit:<policy>:<subject>}:<shape>:counts
-- ARGV[1]  groups   for the subjects that are counted by one policy, as many times as there are policies, in the order of the keys:
--                   head, little endian: 6 bytes ttl_ms, see rate_limit_check_plain; 2 bytes the number of subjects; 4 bytes for
--                   the cost of each, which may be missing if all of them are 1;
--                   terms and limits, see rate_limit_check;
--                   format, how the packed value is read, for struct.unpack: 'c', the length of limits, and what is behind it, from
--                   '<' on
--
-- Value    counts: see rate_limit_check; their time to live is that of rate_limit_check_plain
-- Returns  if each is charged, what rate_limit_check_plain returns for one key behind the other, as one string: the policy says how long each
--          is. Otherwise a list that has for each key what that returns, or an error that concerns this key alone
-- Errors   none of its own
-- Repeat   charges again: not to be resent after a lost reply
local keys, groups = KEYS, ARGV
local unpack_table = unpack
local call, pcall, pack, unpack, ceil = redis.call, redis.pcall, struct.pack, struct.unpack, math.ceil
local TERM = 17
local TOKEN_BUCKET, FIXED_WINDOW = 1, 2
-- How what was charged is written.
local WITHIN, WHOLE, NEW = 1, 2, 3

local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local replies, n, are_all_charged = {}, 0, true
for at_group = 1, #groups, 4 do
  local head, terms, limits, format = unpack_table(groups, at_group, at_group + 3)
  local ttl_ms, subjects = unpack('<I6I2', head)
  local are_all_one = #head == 8
  local offset, layout = format:match('c(%d+)(<d+)')
  local size = #limits + 8 * (#layout - 1)
  -- See rate_limit_check_plain.
  local since = now - now % (ttl_ms * 200)
  local values = call('MGET', unpack_table(keys, n + 1, n + subjects))

  -- One function for each limit, from the last to the first: brings the numbers of its limit up to now, charges them, and hands
  -- those of the limits behind it on. This takes half the time of a loop over a table, and nothing is made for each subject.
  local cost, last, fits = 1, 0, true
  local charge
  for at = #terms - TERM + 1, 1, -TERM do
    local kind, span, step, capacity = unpack('<BI7I5I4', terms, at)
    -- A window that began then or before has ended.
    local rest, ended = charge, now - span
    if kind == TOKEN_BUCKET then
      capacity = capacity * span
      charge = function(since, debt, ...)
        debt = debt - (now - last) * step
        if debt <= 0 then
          since, debt = now, 0
        end
        debt = debt + cost * span
        if debt > capacity then
          fits = false
        end
        if rest then
          return since, debt, rest(...)
        end
        return since, debt
      end
    elseif kind == FIXED_WINDOW then
      charge = function(start, used, ...)
        if start <= ended or used == 0 then
          start, used = now, 0
        end
        used = used + cost
        if used > capacity then
          fits = false
        end
        if rest then
          return start, used, rest(...)
        end
        return start, used
      end
    else
      charge = function(start, previous, used, ...)
        if start <= ended then
          start, previous, used = start + span, start + span > ended and used or 0, 0
        end
        local faded = 0
        if previous > 0 then
          faded = ceil(previous * ceil((start + span - now) / step) / ceil(span / step))
        elseif used == 0 then
          start = now
        end
        used = used + cost
        if used + faded > capacity then
          fits = false
        end
        if rest then
          return start, previous, used, rest(...)
        end
        return start, previous, used
      end
    end
  end
  -- What a value read by `format` is with the cost in it, if it was counted by these limits; whether that fits is in `fits`.
  local function charged(frame, updated, ...)
    if frame == limits and updated <= now then
      last, fits = updated, true
      return pack(layout, now, charge(...))
    end
  end

  -- What was charged to the key at last, and how that is to be written, if anything was; and where the key comes up first.
  local key, first, latest, way = keys[n + 1], n + 1, nil, nil
  for subject = 1, subjects do
    n = n + 1
    local value = values[subject]
    if not are_all_one then
      cost = unpack('<I4', head, 5 + 4 * subject)
    end
    local reply
    if not value then
      -- Nothing but zeros says that nothing has been used.
      reply = charged(unpack(format, limits .. string.rep('\0', size - #limits)))
    elseif #value == size then
      reply = charged(unpack(format, value))
    end
    if not reply then
      reply, are_all_charged = '', false
    elseif fits then
      latest, way = reply, way or (not value and NEW or last < since and WHOLE or WITHIN)
    else
      reply, are_all_charged = pack('<BI7', 0, now) .. (value or ''), false
    end
    replies[n] = reply

    local next_key = keys[n + 1]
    if next_key == key and subject < subjects then
      if way then
        values[subject + 1] = limits .. latest
      end
    else
      local failure
      if way == WITHIN then
        local done = pcall('SETRANGE', key, offset, latest)
        failure = done ~= size and done
      elseif way == WHOLE then
        local done = pcall('SET', key, limits .. latest, 'PX', ttl_ms)
        failure = done.err and done
      elseif way == NEW then
        -- What is read as nothing may be something else than a string.
        local done = pcall('SET', key, limits .. latest, 'PX', ttl_ms, 'NX')
        failure = not done and '' or done.err and done
      end
      if failure then
        are_all_charged = false
        for other = first, n do
          replies[other] = failure
        end
      end
      key, first, way = next_key, n + 1, nil
    end
  end
end
-- One string takes Redis and the client a fraction of the time of a list.
return are_all_charged and table.concat(replies) or replies
