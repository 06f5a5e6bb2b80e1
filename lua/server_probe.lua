-- server_probe: whether this user may run scripts on keys of ours. Changes nothing.
--
-- KEYS[1]  probe     any key of ours; it is not looked at        prefix:2:{probe}
-- ARGV[1]  number    any integer
--
-- Value    none
-- Returns  the number
-- Errors   none of its own; NOPERM where the user may not run scripts, read the time or touch the key
-- Repeat   harmless
local probe, number = KEYS[1], ARGV[1] + 0
redis.call('TIME')
return probe and number
