-- cache_filter_allocate: create a version of an exists filter without set bits, or allocate the next part of it.
--
-- Includes cache_filter_header
-- KEYS[1]  bits      string, expires after build_ms       prefix:2:{cache_filter:<filter>}:bits:<version>
-- ARGV[1]  blocks    number of blocks of 32 bytes
-- ARGV[2]  seed      of the hash, 16 bytes
-- ARGV[3]  step      largest number of bytes to allocate, at most 1 MiB
-- ARGV[4]  build_ms  how long the version is kept from now on
--
-- Returns  1 all blocks are allocated; 0 call again
-- Errors   WRONGTYPE
-- Repeat   allocates the next part
local bits, blocks, seed, step, build_ms = KEYS[1], ARGV[1] + 0, ARGV[2], ARGV[3] + 0, ARGV[4]

local length = redis.call('STRLEN', bits)
if length < 64 then
  local header = struct.pack('<c5c1I2I4c16I7I7I7', 'TGEF\1', 'B', 0, blocks, seed, 0, 0, 0)
  redis.call('SET', bits, header .. string.rep('\0', 64 - #header), 'PX', build_ms)
  length = 64
end
local wanted = 64 + 32 * blocks
local grown = math.min(wanted, length + math.min(step, 1048576))
if grown > length then
  redis.call('SETRANGE', bits, grown - 1, '\0')
end
redis.call('PEXPIRE', bits, build_ms)
return grown == wanted and 1 or 0
