-- cache_release: end the lease of a load without an entry, and leave a mark if there is one.
--
-- Includes server_notify
-- KEYS[1]  lease    string, see cache_claim               prefix:2:{cache:<cache>:<key>}:lease
-- KEYS[2]  entry    string, see cache_put                 prefix:2:{cache:<cache>:<key>}:entry
-- ARGV[1]  token    of the load
-- ARGV[2]  mark     F for a failure, U if the value is not cached, empty for none
-- ARGV[3]  mark_ms  how long the mark lasts
-- ARGV[4]  publish  PUBLISH, or SPUBLISH on a cluster
-- ARGV[5]  channel  channel of the waiters
--
-- Value    lease: see cache_claim. entry: removed if the value is not cached
-- Returns  1 released; 0 the token does not hold the lease
-- Errors   WRONGTYPE
-- Repeat   harmless
local lease, entry, token, mark, mark_ms, publish, channel = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

if redis.call('GET', lease) ~= 'L' .. token then
  return 0
end
if mark == 'U' then
  redis.call('UNLINK', entry)
end
if mark == '' then
  redis.call('UNLINK', lease)
else
  redis.call('SET', lease, mark, 'PX', mark_ms)
end
notify(publish, channel, '1')
return 1
