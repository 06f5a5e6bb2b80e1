-- cache_put: store an entry, for a load that holds the lease, or unconditionally.
--
-- Includes server_notify
-- KEYS[1]  entry      string                              prefix:2:{cache:<cache>:<key>}:entry
-- KEYS[2]  lease      string, see cache_claim             prefix:2:{cache:<cache>:<key>}:lease
-- ARGV[1]  token      of the load, the id of the entry
-- ARGV[2]  is_load    1 if the token must hold the lease, else 0
-- ARGV[3]  is_value   1 for a value, 0 if the origin has none
-- ARGV[4]  fresh_ms   how long the entry is fresh
-- ARGV[5]  ttl_ms     how long it is kept
-- ARGV[6]  load_ms    how long the load took
-- ARGV[7]  tags       of the entry, each: 1 byte length of the tag, the tag, and its generation of 16 bytes
-- ARGV[8]  value      encoded value
-- ARGV[9]  publish    PUBLISH, or SPUBLISH on a cluster
-- ARGV[10] channel    channel of the waiters
--
-- Value    entry: 1 byte version 1, 1 byte is_value, 16 bytes id, 7 bytes time of the put, 7 bytes time of becoming stale.
--          Then 7 bytes time of its end, 4 bytes load_ms, 2 bytes length of the tags, the tags, the value. Times are in
--          milliseconds of the server's clock. Numbers are little endian
-- Returns  {stored, now_ms}: 1, or 0 if the token does not hold the lease. now_ms is the server's clock
-- Errors   WRONGTYPE
-- Repeat   a load stores nothing again, and gets 1 while the entry is the same. With is_load 0, the entry is stored again
local entry, lease, token, is_load, is_value = KEYS[1], KEYS[2], ARGV[1], ARGV[2] == '1', ARGV[3] + 0
local fresh_ms, ttl_ms, load_ms, tags, value = ARGV[4] + 0, ARGV[5] + 0, ARGV[6] + 0, ARGV[7], ARGV[8]
local publish, channel = ARGV[9], ARGV[10]

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
if is_load and redis.call('GET', lease) ~= 'L' .. token then
  local is_same = redis.call('GETRANGE', entry, 2, 17) == token
  return {is_same and 1 or 0, now_ms}
end
local header = struct.pack('<BBc16I7I7I7I4I2', 1, is_value, token, now_ms, now_ms + fresh_ms, now_ms + ttl_ms, load_ms, #tags)
redis.call('SET', entry, header .. tags .. value, 'PX', ttl_ms)
redis.call('UNLINK', lease)
notify(publish, channel, '1')
return {1, now_ms}
