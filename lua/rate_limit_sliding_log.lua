-- rate_limit_sliding_log: charge a request if the window that ends now has room for it, and say how the window stands.
--
-- The log lists the charges of the last window_us, the oldest first. Each entry carries the sum of all charges up to and
-- including it, so what lies between two entries is a subtraction and every question is a binary search: the work is
-- logarithmic in the length of the log, whatever has run out since the last call.
--
-- KEYS[1]  log        string, expires a window after its last entry    prefix:1:{rate_limit:<policy>:<subject>}:log:<window_us>
-- ARGV[1]  limit      integer, 1 to 10,000
-- ARGV[2]  window_us  integer, 10,000 to 3.2 * 10^14
-- ARGV[3]  cost       integer, 0 to limit; 0 charges nothing
-- ARGV[4]  peek       1 to charge nothing, 0 otherwise
--
-- Value    version 1: one byte 1, five bytes sum before the first entry; then twelve bytes an entry: seven bytes time in
--          us, five bytes sum; little endian, sums modulo 2^40. After a charge fewer than 64 entries have run
--          out, or fewer than a quarter as many as have not.
-- Returns  {1, remaining, 0, reset_us} admitted | {0, remaining, retry_us, reset_us} denied, nothing written
-- Errors   TOLLGATE if the value was not written by this script; WRONGTYPE
-- Repeat   charges again: not to be resent after a lost reply
local log = KEYS[1]
local limit, window_us, cost, peek = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

-- The key outlives its window by this much, since expiry is counted in whole milliseconds of another reading of the clock.
local GRACE_MS = 10
local HEADER, HEADER_FORMAT = 6, '<I1I5'
local ENTRY, ENTRY_FORMAT = 12, '<I7I5'
local MODULUS = 2 ^ 40
-- Most logs are short: this much is read at once, and single entries beyond it as they are needed.
local READ_AHEAD = 1024

local time = redis.call('TIME')
local clock = tonumber(time[1]) * 1000000 + tonumber(time[2])

local head = redis.call('GETRANGE', log, 0, READ_AHEAD - 1)
local bytes = #head < READ_AHEAD and #head or redis.call('STRLEN', log)
local base, entries = 0, 0
if bytes > 0 then
  if head:byte(1) ~= 1 or bytes < HEADER + ENTRY or (bytes - HEADER) % ENTRY ~= 0 then
    return redis.error_reply('TOLLGATE the value is not a sliding log of version 1')
  end
  local _
  _, base = struct.unpack(HEADER_FORMAT, head)
  entries = (bytes - HEADER) / ENTRY
end

-- The time and the sum of entry i, counted from 0.
local function entry(i)
  local at = HEADER + i * ENTRY
  if at + ENTRY <= #head then
    return struct.unpack(ENTRY_FORMAT, head, at + 1)
  end
  return struct.unpack(ENTRY_FORMAT, redis.call('GETRANGE', log, at, at + ENTRY - 1))
end

-- The first entry from `low` on that passes `test`, where all behind one that passes do too; `entries` if there is none.
-- Halves the rest with each turn.
local function first_that(test, low)
  local high = entries
  while low < high do
    local middle = math.floor((low + high) / 2)
    if test(entry(middle)) then
      high = middle
    else
      low = middle + 1
    end
  end
  return low
end

local now, last_time, last_sum = clock, 0, 0
if entries > 0 then
  last_time, last_sum = entry(entries - 1)
  if last_time - window_us > clock then
    -- The clock was set back by more than a window. Waiting for it to catch up could take for ever, so start afresh.
    entries = 0
  else
    -- Set back by less, it stands still for this key until it has caught up.
    now = math.max(clock, last_time)
  end
end

local first = first_that(function(at) return at + window_us > now end, 0)
if first > 0 then
  local _
  _, base = entry(first - 1)
end
local used = first < entries and (last_sum - base) % MODULUS or 0

-- How long until entry i has run out.
local function until_gone(i)
  local at = entry(i)
  return at + window_us - clock
end

local left = math.max(limit - used, 0)
if cost > left then
  local excess = used + cost - limit
  local last_to_go = first_that(function(_, sum) return (sum - base) % MODULUS >= excess end, first)
  return {0, left, until_gone(last_to_go), until_gone(first)}
end

if peek == 0 and cost > 0 then
  local ttl_ms = math.ceil((now + window_us - clock) / 1000) + GRACE_MS
  if first == entries then
    redis.call('SET', log, struct.pack(HEADER_FORMAT, 1, 0) .. struct.pack(ENTRY_FORMAT, now, cost), 'PX', ttl_ms)
    return {1, left - cost, 0, now + window_us - clock}
  end
  local added = struct.pack(ENTRY_FORMAT, now, (last_sum + cost) % MODULUS)
  if first >= 64 and first * 4 >= entries - first then
    local live = redis.call('GETRANGE', log, HEADER + first * ENTRY, -1)
    local reset = until_gone(first)
    redis.call('SET', log, struct.pack(HEADER_FORMAT, 1, base) .. live .. added, 'PX', ttl_ms)
    return {1, left - cost, 0, reset}
  end
  redis.call('APPEND', log, added)
  redis.call('PEXPIRE', log, ttl_ms)
  return {1, left - cost, 0, until_gone(first)}
end
return {1, left, 0, used > 0 and until_gone(first) or 0}
