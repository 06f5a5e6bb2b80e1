-- rate_limit_check: charge a request to all limits of a policy, or to none if one of them is exhausted. Several descriptors, all
-- different, are charged together or not at all. Also peeks without a charge, and corrects earlier charges.
--
-- One packed value holds all limits of a descriptor except sliding logs. A sliding log has its own key. It lists the charges of the
-- last window, oldest first, and each entry carries the running sum. So the units between two entries are a subtraction, and each
-- query is a binary search. The client derives remaining units and waiting times from the reply.
--
-- Includes rate_limit_refill, rate_limit_fade
-- KEYS[1]  counts  string, expires when the counts no longer matter        prefix:2:{rate_limit:<policy>:<key>}:<shape>:counts
--          then one for each sliding log among the limits, in their order     ...{...}:<shape>:log:<window_us>
--          then the same for each further descriptor
-- ARGV[1]  verb    'check' to charge | 'peek' to charge nothing | 'settle' to correct a charge of one descriptor
-- ARGV[2]  cost    integer, 0 to the smallest capacity; 0 charges nothing. To settle: the units to add, or, below 0, to give back
-- ARGV[3]  change  for counts of another quota: 'keep' | 'reset' | 'proportional'. A refund, or a correction whose own quota would cut
--                  or forget counts, uses the stored quota instead
-- ARGV[4]  ttl_ms  how long the counts matter after a write, at most, plus a quarter
-- ARGV[5]  params  of each limit, little endian: 1 byte algorithm (1 token bucket, 2 fixed window, 3 sliding window, 4 sliding
--                  log), 7 bytes span, 7 bytes step, 4 bytes parts, 7 bytes capacity (see `LimitParams` in algorithm.rs)
-- ARGV[6]  layout  format of the last update and the counts, for struct.pack
-- ARGV[7]  limits  first bytes of a packed value of these limits, see Value
--          then cost, change, ttl_ms, params, layout and limits for each further descriptor
-- ARGV[8]  at      settle only: time of the charge that is corrected, in us; 0 if nothing was charged
-- ARGV[9]  missing  settle only: tokens missing after that charge in the first token bucket of the limits
-- ARGV[10] missing  and in the second; 0 if unknown
--
-- Returns  a string, or an array of strings for several descriptors. If one descriptor without logs was charged: the last update,
--          which is the clock, and the stored counts. Otherwise 1 byte status (0 denied, 2 blocked, 3 admitted) and 7 bytes clock.
--          Then for each log 5 bytes used, 7 bytes us until the cost fits, 7 bytes us until more is left. Then the stored value.
--          Nothing is charged unless all descriptors are admitted.
-- Errors   TOLLGATE if a value was not written by this script; WRONGTYPE
-- Repeat   charges or refunds again: never resend after a lost reply
-- Value    counts  version 5, little endian: 1 byte version. For each limit the parameters that the shape in the key lacks:
--                  7 bytes span, 7 bytes step, 4 bytes parts and 7 bytes capacity of a token bucket, 7 bytes capacity of the others.
--                  Then integers below 2^53 as doubles, which Lua reads and writes fastest: time of the last update, and for
--                  each limit except logs:
--                  token bucket    full since, debt, part of a worth of 1 that is missing as well
--                  fixed window    start, used
--                  sliding window  start, used in the window before it, used in it
--                  While the key is blocked, version 2 and 7 bytes end of the block precede the counts, which may be missing.
--          log     version 2, little endian: 1 byte version, 5 bytes sum before the first entry, 7 bytes by how much the log's
--                  clock is ahead of the server's; for each entry 7 bytes time by the log's clock, 5 bytes sum, modulo 2^40.
--                  After a charge, fewer than 64 entries are expired, or fewer than a quarter of the live ones.
--                  Each verb, also 'peek', rewrites both after the clock was set back: no time passes between the last update and this
--                  call.
local unpack_table = unpack
local call, pack, unpack, byte, sub = redis.call, struct.pack, struct.unpack, string.byte, string.sub
local ceil, floor, max, min = math.ceil, math.floor, math.max, math.min
local verb = ARGV[1]
local settle = verb == 'settle'
local time = call('TIME')
local now = time[1] * 1000000 + time[2]

local PARAMS_SIZE = 26
local FOREIGN = 'TOLLGATE the value does not hold counts of version 5'
local TOKEN_BUCKET, FIXED_WINDOW, SLIDING_WINDOW, SLIDING_LOG = 1, 2, 3, 4
-- Keys outlive their counts by this much: Redis counts expiry in whole milliseconds of another clock reading.
local GRACE_MS = 10
-- The bounds of products and of counts, see `LimitParams` in algorithm.rs.
local EXACT, STEPS, MAX_COUNT = 2 ^ 51, 2 ^ 26, 2 ^ 53 - 1

-- Create closures only if needed: creating one takes as long as calling a command.
local open_log
if #KEYS > 1 then
  -- A sliding log: the units used, and functions that compute waits, charge and refund.
  open_log = function(log, window_us, forget)
    local AHEAD, ENTRIES, ENTRIES_FORMAT, ENTRY, ENTRY_FORMAT = 6, 13, '<I1I5I7', 12, '<I7I5'
    local MODULUS = 2 ^ 40
    -- Most logs are short: read this much at once, and single entries beyond it on demand.
    local READ_AHEAD = 1024

    local head = forget and '' or call('GETRANGE', log, 0, READ_AHEAD - 1)
    local bytes = #head < READ_AHEAD and #head or call('STRLEN', log)
    local base, ahead, entries = 0, 0, 0
    if bytes > 0 then
      if byte(head, 1) ~= 2 or bytes < ENTRIES + ENTRY or (bytes - ENTRIES) % ENTRY ~= 0 then
        return nil, 'TOLLGATE the value is not a sliding log of version 2'
      end
      local _
      _, base, ahead = unpack(ENTRIES_FORMAT, head)
      entries = (bytes - ENTRIES) / ENTRY
    end

    -- The time and the sum of entry i, counted from 0.
    local function entry(i)
      local at = ENTRIES + i * ENTRY
      if at + ENTRY <= #head then
        return unpack(ENTRY_FORMAT, head, at + 1)
      end
      return unpack(ENTRY_FORMAT, call('GETRANGE', log, at, at + ENTRY - 1))
    end

    -- Binary search: the first entry from `low` on that passes `test`, or `entries`. All later entries must pass as well.
    local function find_first(test, low)
      local high = entries
      while low < high do
        local middle = floor((low + high) / 2)
        if test(entry(middle)) then
          high = middle
        else
          low = middle + 1
        end
      end
      return low
    end

    local clock, last_sum = now + ahead, 0
    if entries > 0 then
      local last_time
      last_time, last_sum = entry(entries - 1)
      if last_time > clock then
        -- The clock was set back. Shift the log's clock: moving all entries would take time for each of them.
        ahead, clock = last_time - now, last_time
        call('SETRANGE', log, AHEAD, pack('<I7', ahead))
      end
    end
    local first = find_first(function(at) return at + window_us > clock end, 0)
    if first > 0 then
      local _
      _, base = entry(first - 1)
    end
    local used = first < entries and (last_sum - base) % MODULUS or 0
    local ttl_ms = ceil(window_us / 1000) + GRACE_MS

    -- Time until at most `most` units are used.
    local function wait(most)
      if used <= most then
        return 0
      end
      local at = entry(find_first(function(_, sum) return (sum - base) % MODULUS >= used - most end, first))
      return at + window_us - clock
    end

    -- Returns the time until more units are left.
    local function charge(units)
      if first == entries then
        call('SET', log, pack(ENTRIES_FORMAT, 2, 0, 0) .. pack(ENTRY_FORMAT, now, units), 'PX', ttl_ms)
        return window_us
      end
      local oldest = entry(first)
      local added = pack(ENTRY_FORMAT, clock, (last_sum + units) % MODULUS)
      if first >= 64 and first * 4 >= entries - first then
        local live = call('GETRANGE', log, ENTRIES + first * ENTRY, -1)
        call('SET', log, pack(ENTRIES_FORMAT, 2, base, ahead) .. live .. added, 'PX', ttl_ms)
      else
        call('APPEND', log, added)
        call('PEXPIRE', log, ttl_ms)
      end
      return oldest + window_us - clock
    end

    -- Rewrites the entries from the charge at `at` on: subtracts `units` and drops entries that cost nothing then.
    -- A log has at most as many entries as the limit has units, or twice as many in debt.
    local function refund(at, units)
      at = at + ahead
      local from = find_first(function(time) return time >= at end, first)
      if from == entries or entry(from) ~= at then
        return
      end
      local before = base
      if from > first then
        local _
        _, before = entry(from - 1)
      end
      local live = call('GETRANGE', log, ENTRIES + first * ENTRY, -1)
      local kept, position, given = {sub(live, 1, (from - first) * ENTRY)}, (from - first) * ENTRY + 1, 0
      while position <= #live do
        local entry_time, entry_sum
        entry_time, entry_sum, position = unpack(ENTRY_FORMAT, live, position)
        local cost = (entry_sum - before) % MODULUS
        before = entry_sum
        local back = entry_time == at and min(cost, units - given) or 0
        given = given + back
        if cost > back then
          kept[#kept + 1] = pack(ENTRY_FORMAT, entry_time, (entry_sum - given) % MODULUS)
        end
      end
      live = table.concat(kept)
      if live == '' then
        call('UNLINK', log)
      else
        call('SET', log, pack(ENTRIES_FORMAT, 2, base, ahead) .. live, 'PX', ttl_ms)
      end
    end

    return {used = used, wait = wait, charge = charge, refund = refund}
  end
end

local descriptors, admitted = {}, true
local next_key = 1
for arg = 2, settle and 2 or #ARGV, 6 do
  local key, cost = KEYS[next_key], ARGV[arg] + 0
  local change, ttl_ms, limits = ARGV[arg + 1], ARGV[arg + 2], ARGV[arg + 5]
  local packed_params, layout = ARGV[arg + 3], ARGV[arg + 4]
  next_key = next_key + 1
  if settle and cost < 0 and ARGV[8] - now > 0 then
    -- The charge predates a clock step back, and may have expired.
    cost = 0
  end

  local stored = call('GET', key) or ''
  local value, block, block_ends = stored, nil, nil
  local status = 1
  if byte(stored, 1) == 2 and #stored >= 8 then
    value = sub(stored, 9)
    block, block_ends = sub(stored, 1, 8), unpack('<I7', stored, 2)
    if block_ends > now then
      status = 2
    else
      block_ends = nil
    end
  end
  -- Algorithm, span, step, parts and capacity of each limit.
  local params = {unpack('<' .. string.rep('BI7I7I4I7', #packed_params / PARAMS_SIZE), packed_params)}
  local last_param = #params - 1
  -- Format of the limit parameters at the start of a value.
  local frame_format = '<B'
  for i = 1, last_param, 5 do
    frame_format = frame_format .. (params[i] == TOKEN_BUCKET and 'I7I7I4I7' or 'I7')
  end
  local known, size = value ~= '', #limits + struct.size(layout)
  if not known then
    -- Zeros mean that no unit was used.
    value = limits .. string.rep('\0', size - #limits)
  end
  if #value ~= size or byte(value, 1) ~= 5 then
    return redis.error_reply(FOREIGN)
  end

  -- The last update and the counts. They are advanced to the current time and charged, and written if the request is admitted.
  local counts = {unpack(layout, value, #limits + 1)}
  if counts[1] > now then
    -- The clock was set back: no time has passed since the last update.
    local back, at = counts[1] - now, 2
    counts[1] = now
    for i = 1, last_param, 5 do
      if params[i] ~= SLIDING_LOG then
        -- No instant is below 0, which could not be read.
        counts[at] = max(counts[at] - back, 0)
        at = at + (params[i] == FIXED_WINDOW and 2 or 3)
      end
    end
    value = sub(value, 1, #limits) .. pack(layout, unpack_table(counts))
    stored = (block or '') .. value
    call('SET', key, stored, 'KEEPTTL')
  end
  local forget
  -- The stored quota, if it has the same algorithms and windows but other numbers.
  local before = known and sub(value, 1, #limits) ~= limits and {unpack(frame_format, value)}
  local stays = before and settle
  if stays and cost > 0 then
    -- A correction may carry an older and smaller quota: do not cut counts to it.
    local cuts, is_used = change == 'reset', false
    local at, from, log_key = 2, 2, next_key
    for i = 1, last_param, 5 do
      local kind, span, passed = params[i], params[i + 1], now - (counts[at] or 0)
      if kind == TOKEN_BUCKET then
        local debt, part = refilled(counts[at + 1], counts[at + 2], now - counts[1], before[from + 1], before[from + 2])
        is_used = is_used or debt >= 0 and debt + part > 0
        at, from = at + 3, from + 3
      elseif kind == FIXED_WINDOW then
        is_used = is_used or counts[at + 1] > 0 and passed < span
        at = at + 2
      elseif kind == SLIDING_WINDOW then
        is_used = is_used or counts[at + 1] > 0 and passed < span or counts[at + 2] > 0 and passed < 2 * span
        at = at + 3
      else
        local log = not is_used and open_log(KEYS[log_key], span)
        is_used = not log or log.used > 0
        log_key = log_key + 1
      end
      cuts = cuts or params[i + 4] < before[from]
      from = from + 1
    end
    stays = ARGV[8] ~= '0' and cuts and is_used
  end
  if stays then
    limits = sub(value, 1, #limits)
    local from, longest = 2, 0
    for i = 1, last_param, 5 do
      local kind, span, capacity = params[i], params[i + 1], before[from]
      local lasts = span
      if kind == TOKEN_BUCKET then
        local step, parts
        span, step, parts, capacity = before[from], before[from + 1], before[from + 2], before[from + 3]
        if span == 0 or parts == 0 then
          return redis.error_reply(FOREIGN)
        end
        lasts = ceil(min(2 * capacity, MAX_COUNT) * span / max(step, 1)) * parts
        params[i + 1], params[i + 2], params[i + 3] = span, step, parts
        from = from + 3
      elseif kind == SLIDING_WINDOW then
        lasts = 2 * span
        params[i + 2] = ceil(span / max(floor(EXACT / max(capacity, 1)), STEPS))
      end
      params[i + 4] = capacity
      from, longest = from + 1, max(longest, lasts)
    end
    ttl_ms = ceil(longest / 1000) + GRACE_MS
    ttl_ms = ttl_ms + ceil(ttl_ms / 4)
  elseif before then
    forget = {}
    -- value * by / of, rounded up, by a binary long multiplication if the product reaches 2^53. The remainder stays below `of`.
    local function scaled(value, by, of)
      if value * by <= MAX_COUNT then
        return ceil(value * by / of)
      end
      local whole = floor(value / of)
      value = value - whole * of
      local quotient, rest, bits = 0, 0, by
      for bit = 52, 0, -1 do
        quotient = quotient * 2
        for term = 1, 2 do
          -- The remainder is doubled, and `value` is added if the bit is set.
          local more = term == 1 and rest or bits >= 2 ^ bit and value or 0
          if rest >= of - more then
            quotient, rest = quotient + 1, rest - (of - more)
          else
            rest = rest + more
          end
        end
        bits = bits % 2 ^ bit
      end
      return whole * by + quotient + (rest > 0 and 1 or 0)
    end
    local elapsed, at, from = now - counts[1], 2, 2
    for i = 1, last_param, 5 do
      local kind, span, step, parts, new = params[i], params[i + 1], params[i + 2], params[i + 3], params[i + 4]
      if kind == TOKEN_BUCKET then
        span, step, parts = before[from], before[from + 1], before[from + 2]
        from = from + 3
        if span == 0 or parts == 0 then
          return redis.error_reply(FOREIGN)
        end
      end
      local old = before[from]
      from = from + 1
      local same = span == params[i + 1] and step == params[i + 2] and parts == params[i + 3] and old == new
      local function convert(used)
        if change == 'reset' then
          return 0
        end
        return min(change == 'proportional' and scaled(used, new, max(old, 1)) or used, 2 * new, MAX_COUNT)
      end
      if kind == TOKEN_BUCKET then
        -- Refill at the old rate up to now, then convert whole tokens.
        local debt, part = refilled(counts[at + 1], counts[at + 2], elapsed, step, parts)
        if debt < 0 or debt + part == 0 then
          counts[at], debt, part = now, 0, 0
        end
        if not same then
          debt, part = convert(ceil((part > 0 and debt + 1 or debt) / span)) * params[i + 1], 0
        end
        counts[at + 1], counts[at + 2] = debt, part
        at = at + 3
      elseif kind == FIXED_WINDOW then
        counts[at + 1] = same and counts[at + 1] or convert(counts[at + 1])
        at = at + 2
      elseif kind == SLIDING_WINDOW then
        counts[at + 1] = same and counts[at + 1] or convert(counts[at + 1])
        counts[at + 2] = same and counts[at + 2] or convert(counts[at + 2])
        at = at + 3
      else
        forget[i] = not same and change == 'reset'
      end
    end
    counts[1] = now
  end
  local last = counts[1]
  counts[1] = now
  local logs
  local buckets, at = 0, 2
  for i = 1, last_param, 5 do
    local kind, span, step, parts, capacity = params[i], params[i + 1], params[i + 2], params[i + 3], params[i + 4]
    local fits, most = true, min(2 * capacity, MAX_COUNT)
    if kind == TOKEN_BUCKET then
      local since = counts[at]
      local debt, part = refilled(counts[at + 1], counts[at + 2], now - last, step, parts)
      if debt < 0 or debt + part == 0 then
        since, debt, part = now, 0, 0
      end
      if not settle then
        debt = debt + cost * span
        fits = (part > 0 and debt + 1 or debt) <= capacity * span
      elseif cost > 0 then
        debt = max(debt, min(debt + cost * span, most * span))
        if debt >= most * span then
          part = 0
        end
      elseif ARGV[8] - since >= 0 then
        -- Without the charge the bucket may have been full for a while, and refilled tokens would have been lost. Refund only
        -- tokens that were missing after the charge and have not been refilled since.
        local units, missing = min(-cost, most), min(ARGV[9 + buckets] or 0, most)
        local still = refilled(max(missing - 1, units) * span, 0, max(now - ARGV[8], 0), step, parts)
        debt = debt - min(units * span, max(still, 0))
        if debt < 0 then
          debt, part = 0, 0
        end
      end
      buckets = buckets + 1
      counts[at], counts[at + 1], counts[at + 2] = since, debt, part
      at = at + 3
    elseif kind == FIXED_WINDOW then
      local start, used = counts[at], counts[at + 1]
      -- A window opens with its first charge.
      if used == 0 or now - start >= span then
        start, used = now, 0
      end
      if not settle then
        used = used + cost
        fits = used <= capacity
      elseif cost > 0 then
        used = max(used, min(used + cost, most))
      elseif ARGV[8] - start >= 0 then
        used = max(used + cost, 0)
      end
      counts[at], counts[at + 1] = start, used
      at = at + 2
    elseif kind == SLIDING_WINDOW then
      local start, previous, used = counts[at], counts[at + 1], counts[at + 2]
      local elapsed = now - start
      if elapsed >= span and elapsed < 2 * span then
        start, previous, used = start + span, used, 0
      elseif elapsed >= span then
        previous, used = 0, 0
      end
      if previous + used == 0 then
        start = now
      end
      local weighted = faded(previous, ceil((span - (now - start)) / step), ceil(span / step))
      if not settle then
        used = used + cost
        fits = used + weighted <= capacity
      elseif cost > 0 then
        used = used + max(min(cost, most - used - weighted), 0)
      elseif ARGV[8] - start >= 0 then
        used = max(used + cost, 0)
      elseif ARGV[8] - start + span >= 0 then
        previous = max(previous + cost, 0)
      end
      counts[at], counts[at + 1], counts[at + 2] = start, previous, used
      at = at + 3
    elseif kind == SLIDING_LOG then
      local log, error = open_log(KEYS[next_key], span, forget and forget[i])
      if not log then
        return redis.error_reply(error)
      end
      log.key, log.capacity, log.forget = KEYS[next_key], capacity, forget and forget[i]
      next_key = next_key + 1
      fits = log.used + cost <= capacity
      logs = logs or {}
      logs[#logs + 1] = log
    end
    -- A cost of 0 always fits.
    if not fits and not settle and cost > 0 and status == 1 then
      status = 0
    end
  end
  admitted = admitted and status == 1
  if #KEYS == 1 and status == 1 and cost > 0 and verb == 'check' then
    -- The common case, without a table.
    local charged = pack(layout, unpack_table(counts))
    call('SET', key, limits .. charged, 'PX', ttl_ms)
    return charged
  end
  local packed = limits .. pack(layout, unpack_table(counts))
  if block_ends then
    packed, ttl_ms = block .. packed, max(ttl_ms + 0, ceil((block_ends - now) / 1000) + GRACE_MS)
  end
  descriptors[#descriptors + 1] =
    {key = key, cost = cost, status = status, stored = stored, known = known, logs = logs, packed = packed, ttl_ms = ttl_ms}
end

local replies = {}
for i = 1, #descriptors do
  local descriptor = descriptors[i]
  local cost, stored, logs = descriptor.cost, descriptor.stored, descriptor.logs
  local writes = verb == 'check' and admitted and cost > 0 or settle and (cost > 0 or descriptor.known and cost < 0)
  if writes then
    stored = descriptor.packed
    call('SET', descriptor.key, stored, 'PX', descriptor.ttl_ms)
  end
  local reply = pack('<BI7', descriptor.status == 1 and 3 or descriptor.status, now)
  for j = 1, logs and #logs or 0 do
    local log = logs[j]
    local used, capacity = log.used, log.capacity
    local fits_in, more_in = 0, 0
    if writes and log.forget then
      call('UNLINK', log.key)
    end
    if not writes then
      fits_in = cost > 0 and log.wait(capacity - cost) or 0
      more_in = used > 0 and log.wait(min(used, capacity) - 1) or 0
    elseif cost < 0 then
      log.refund(ARGV[8] + 0, -cost)
    else
      local units = settle and max(min(cost, 2 * capacity - used), 0) or cost
      if units > 0 then
        more_in = log.charge(units)
      end
      used = used + units
    end
    reply = reply .. pack('<I5I7I7', used, fits_in, more_in)
  end
  replies[i] = reply .. stored
end
return #replies == 1 and replies[1] or replies
