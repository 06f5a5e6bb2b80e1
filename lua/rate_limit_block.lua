-- rate_limit_block: deny all requests of a key for a while, or lift the block. The counts stay.
--
-- KEYS[1]  counts    string, see rate_limit_check        prefix:2:{rate_limit:<policy>:<key>}:<shape>:counts
-- ARGV[1]  block_us  integer, 0 to 3.2 * 10^14; 0 lifts the block
-- ARGV[2]  ttl_ms    how long counts matter after they were written, at most, plus a quarter
-- ARGV[3]  limits    first bytes of counts that were written under these limits, see rate_limit_check
--
-- Value    counts: while the key is blocked, 1 byte version 2 and 7 bytes end of the block, little endian, then the counts as
--          rate_limit_check writes them, or nothing
-- Returns  1 blocked | 0 not blocked
-- Errors   TOLLGATE if the value was not written by these scripts; WRONGTYPE
-- Repeat   harmless: the block ends later by the time between the calls
local counts, block_us, ttl_ms, limits = KEYS[1], ARGV[1] + 0, ARGV[2] + 0, ARGV[3]

local stored = redis.call('GET', counts) or ''
if stored:byte(1) == 2 and #stored >= 8 then
  stored = stored:sub(9)
end
local version = stored:byte(1)
if version and version ~= 5 then
  return redis.error_reply('TOLLGATE the value does not hold counts of version 5')
end
local left_ms = 0
if stored ~= '' then
  -- A block may have extended the expiry beyond what the counts need, and a key without an expiry gets one. Policies with other limits
  -- on this key may need longer; that is not known here.
  left_ms = redis.call('PTTL', counts)
  if left_ms < 0 then
    left_ms = ttl_ms
  elseif left_ms > ttl_ms and stored:find(limits, 1, true) == 1 then
    -- After the clock was set back, the last update may be ahead of it. The counts may matter until ttl_ms after that update.
    local time = redis.call('TIME')
    local ahead_us = struct.unpack('<d', stored, #limits + 1) - time[1] * 1000000 - time[2]
    left_ms = math.min(left_ms, ttl_ms + math.max(0, math.ceil(ahead_us / 1000)))
  end
end
if block_us > 0 then
  local time = redis.call('TIME')
  local ends = time[1] * 1000000 + time[2] + block_us
  redis.call('SET', counts, struct.pack('<BI7', 2, ends) .. stored, 'PX', math.max(left_ms, math.ceil(block_us / 1000) + 10))
  return 1
end
if stored == '' then
  redis.call('UNLINK', counts)
else
  redis.call('SET', counts, stored, 'PX', math.max(left_ms, 1))
end
return 0
