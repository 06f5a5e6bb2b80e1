-- delay_queue_release_unique: release a unique key, whichever job holds it.
--
-- Includes delay_queue_time, delay_queue_keys
-- ARGV[4]  key  the unique key
--
-- Returns  1 it was held, or 0
-- Repeat   harmless
local key = ARGV[4]

local holder = redis.call('HGET', unique, key)
local ends_at = holder and struct.unpack('>I6', holder) or 0
local is_held = ends_at > now or (holder and ends_at == 0 and redis.call('HEXISTS', jobs, holder:sub(7)) == 1)
redis.call('HDEL', unique, key)
return is_held and 1 or 0
