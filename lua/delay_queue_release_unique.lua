-- delay_queue_release_unique: release a unique key, whichever job holds it.
--
-- Includes delay_queue_time, delay_queue_keys, delay_queue_unique
-- ARGV[4]  key  the unique key
--
-- Returns  1 it was held, or 0
-- Repeat   harmless
local key = ARGV[4]

local holder, ends_at = holder_of(key)
-- A job that was evicted holds no key.
local is_held = holder and (ends_at > 0 or redis.call('HEXISTS', jobs, holder) == 1)
redis.call('HDEL', unique, key)
return is_held and 1 or 0
