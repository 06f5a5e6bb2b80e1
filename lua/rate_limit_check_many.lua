-- rate_limit_check_many: rate_limit_check_plain for a batch of independent descriptors. Each is charged or denied by itself. It
-- serves decisions that are requested at the same time and would cost a call each. A descriptor may repeat directly after itself, and again
-- in other groups.
--
-- Includes rate_limit_refill, rate_limit_fade
-- KEYS[1]  keys     strings, at most 64 of them, see rate_limit_check    prefix:2:{rate_limit:<policy>:<key>}:<shape>:counts
-- ARGV[1]  groups   four arguments for each policy, in the order of the keys:
--                   head, little endian: 6 bytes ttl_ms, see rate_limit_check_plain; 2 bytes number of descriptors; 7 bytes cost
--                   of each, left out if all are 1;
--                   params and limits, see rate_limit_check;
--                   format of the packed value for struct.unpack: 'c', the length of limits, then the counts from '<' on
--
-- Value    counts: see rate_limit_check; expiry as in rate_limit_check_plain
-- Returns  if each is charged, the replies of rate_limit_check_plain joined to one string: the policy gives the length of each.
--          Otherwise a list with that reply for each key, or an error of this key alone
-- Errors   none of its own
-- Repeat   charges again: never resend after a lost reply
local keys, groups = KEYS, ARGV
local unpack_table = unpack
local call, pcall, pack, unpack, ceil = redis.call, redis.pcall, struct.pack, struct.unpack, math.ceil
local PARAMS_SIZE = 26
local TOKEN_BUCKET, FIXED_WINDOW = 1, 2
-- How a charge is written: into the value, as a whole value, or as a new key.
local WITHIN, WHOLE, NEW = 1, 2, 3

local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local replies, n, are_all_charged = {}, 0, true
for at_group = 1, #groups, 4 do
  local head, params, limits, format = unpack_table(groups, at_group, at_group + 3)
  local ttl_ms, descriptors = unpack('<I6I2', head)
  local are_all_one = #head == 8
  local offset, layout = format:match('c(%d+)(<d+)')
  local size = #limits + 8 * (#layout - 1)
  -- See rate_limit_check_plain.
  local since = now - now % (ttl_ms * 200)
  local values = call('MGET', unpack_table(keys, n + 1, n + descriptors))

  -- One closure for each limit, from the last to the first. It advances the numbers of its limit to now, charges them, and passes
  -- the rest on. This takes half the time of a loop over a table, and allocates nothing for each descriptor.
  local cost, last, fits = 1, 0, true
  local charge
  for at = #params - PARAMS_SIZE + 1, 1, -PARAMS_SIZE do
    local kind, span, step, parts, capacity = unpack('<BI7I7I4I7', params, at)
    -- A window that began at `ended` or earlier is over.
    local rest, ended = charge, now - span
    if kind == TOKEN_BUCKET then
      capacity = capacity * span
      charge = function(since, debt, part, ...)
        debt, part = refilled(debt, part, now - last, step, parts)
        if debt < 0 or debt + part == 0 then
          since, debt, part = now, 0, 0
        end
        debt = debt + cost * span
        if (part > 0 and debt + 1 or debt) > capacity then
          fits = false
        end
        if rest then
          return since, debt, part, rest(...)
        end
        return since, debt, part
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
        local weighted = 0
        if previous > 0 then
          weighted = faded(previous, ceil((start + span - now) / step), ceil(span / step))
        elseif used == 0 then
          start = now
        end
        used = used + cost
        if used + weighted > capacity then
          fits = false
        end
        if rest then
          return start, previous, used, rest(...)
        end
        return start, previous, used
      end
    end
  end
  -- The charged counts, or nil if the value has other limits or a later update than now. Sets `last` and `fits`.
  local function charged(frame, updated, ...)
    if frame == limits and updated <= now then
      last, fits = updated, true
      return pack(layout, now, charge(...))
    end
  end

  -- The last charged value of the key and how to write it, if it was charged, and the first position of the key.
  local key, first, latest, way = keys[n + 1], n + 1, nil, nil
  for descriptor = 1, descriptors do
    n = n + 1
    local value = values[descriptor]
    if not are_all_one then
      cost = unpack('<I7', head, 2 + 7 * descriptor)
    end
    local reply
    if not value then
      -- Zeros mean that no unit was used.
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
    if next_key == key and descriptor < descriptors then
      if way then
        values[descriptor + 1] = limits .. latest
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
        -- MGET also reads a key of another type as nil.
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
-- Redis and the client handle one string in a fraction of the time of a list.
return are_all_charged and table.concat(replies) or replies
