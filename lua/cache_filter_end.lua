-- cache_filter_end: end the build of a version of an exists filter, and replace the active version if the build is complete.
--
-- Includes cache_filter_header
-- KEYS[1]  versions     string                            prefix:2:{cache_filter:<filter>}:versions
-- KEYS[2]  bits         the unfinished version              prefix:2:{cache_filter:<filter>}:bits:<version>
-- KEYS[3]  old          the active version, or versions again for none
-- ARGV[1]  seen         value of versions that the caller has seen
-- ARGV[2]  ended        new value of versions, empty for none
-- ARGV[3]  is_complete  1 to make bits the active version, 0 to remove it
-- ARGV[4]  ttl_ms       how long the new active version is kept
-- ARGV[5]  keep_ms      how long versions is kept, longer than each version
--
-- Returns  1 ended; 0 versions has another value, or bits is damaged
-- Errors   WRONGTYPE
-- Repeat   harmless
local versions, bits, old, seen, ended, is_complete = KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2], ARGV[3] == '1'
local ttl_ms, keep_ms = ARGV[4], ARGV[5]

local found = read_ids(versions)
if found == ended then
  return 1
end
if found ~= seen then
  return 0
end
if is_complete then
  if not read_header(bits) then
    return 0
  end
  local time = redis.call('TIME')
  local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  redis.call('SETRANGE', bits, 5, 'R')
  redis.call('SETRANGE', bits, 42, struct.pack('<I7', now_ms))
  redis.call('PEXPIRE', bits, ttl_ms)
  if old ~= versions then
    -- In the same step, so that no client tests a version to which keys are no longer added.
    redis.call('UNLINK', old)
  end
else
  redis.call('UNLINK', bits)
end
if ended == '' then
  redis.call('UNLINK', versions)
else
  redis.call('SET', versions, ended, 'PX', keep_ms)
end
return 1
