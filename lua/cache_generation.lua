-- cache_generation: get the generation of a tag, and create it if there is none.
--
-- KEYS[1]  generation  string                             prefix:2:{cache:<cache>:<tag>}:generation
-- ARGV[1]  new         the generation if there is none
-- ARGV[2]  ttl_ms      how long it is kept at least
--
-- Value    generation: 16 random bytes. An invalidation of the tag removes it
-- Returns  the generation
-- Errors   WRONGTYPE
-- Repeat   harmless
local generation, new, ttl_ms = KEYS[1], ARGV[1], ARGV[2]

local current = redis.call('GET', generation)
if not current or #current ~= 16 then
  redis.call('SET', generation, new, 'PX', ttl_ms)
  return new
end
if redis.call('PTTL', generation) < ttl_ms + 0 then
  redis.call('PEXPIRE', generation, ttl_ms)
end
return current
