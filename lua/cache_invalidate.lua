-- cache_invalidate: remove an entry or make it stale, and end the lease of its load.
--
-- Includes server_notify
-- KEYS[1]  entry    string, see cache_put                 prefix:2:{cache:<cache>:<key>}:entry
-- KEYS[2]  lease    string, see cache_claim               prefix:2:{cache:<cache>:<key>}:lease
-- ARGV[1]  is_hard  1 to remove the entry, 0 to make it stale
-- ARGV[2]  publish  PUBLISH, or SPUBLISH on a cluster
-- ARGV[3]  channel  channel of the waiters
--
-- Value    entry: a stale one has 0 as the time at which it becomes stale
-- Returns  1
-- Errors   WRONGTYPE
-- Repeat   harmless: an entry stored in between is removed or stale too
local entry, lease, is_hard, publish, channel = KEYS[1], KEYS[2], ARGV[1] == '1', ARGV[2], ARGV[3]

redis.call('UNLINK', lease)
if is_hard then
  redis.call('UNLINK', entry)
elseif redis.call('STRLEN', entry) >= 45 then
  -- Keeps the expiry.
  redis.call('SETRANGE', entry, 25, string.rep('\0', 7))
end
notify(publish, channel, '1')
return 1
