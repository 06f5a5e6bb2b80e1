-- cache_filter_begin: begin to build a version of an exists filter. From now on, keys are added to it too.
--
-- Includes cache_filter_header
-- KEYS[1]  versions  string                               prefix:2:{cache_filter:<filter>}:versions
-- KEYS[2]  bits      the new version                      prefix:2:{cache_filter:<filter>}:bits:<version>
-- KEYS[3]  old       the version that was built before, or versions again for none
-- ARGV[1]  seen      value of versions that the caller has seen, empty for none
-- ARGV[2]  begun     new value of versions
-- ARGV[3]  keep_ms   how long versions is kept, longer than each version
--
-- Returns  1 begun; 0 versions has another value, or the new version is lost
-- Errors   WRONGTYPE
-- Repeat   harmless
local versions, bits, old, seen, begun, keep_ms = KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2], ARGV[3]

local found = read_ids(versions)
if found == begun then
  return 1
end
if found ~= seen or not read_header(bits) then
  return 0
end
if old ~= versions then
  redis.call('UNLINK', old)
end
redis.call('SET', versions, begun, 'PX', keep_ms)
return 1
