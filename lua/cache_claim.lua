-- cache_claim: claim the lease of a key, to load its value.
--
-- KEYS[1]  entry     string, see cache_put                prefix:2:{cache:<cache>:<key>}:entry
-- KEYS[2]  lease     string                               prefix:2:{cache:<cache>:<key>}:lease
-- ARGV[1]  token     of the load
-- ARGV[2]  seen      id of the entry that the caller has seen, empty for none
-- ARGV[3]  lease_ms  how long the lease lasts
--
-- Value    lease: 1 byte L, and the token: a load holds it. F: a load failed. U: the value is not cached. Expires with the lease or mark
-- Returns  {state, ms, now_ms}. state is 0 if the entry is another one, 1 granted, 2 another load holds the lease, 3 F, 4 U. The last three
--          last for ms. now_ms is the server's clock
-- Errors   WRONGTYPE
-- Repeat   renews the lease of the same token
local entry, lease, token, seen, lease_ms = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
if redis.call('GETRANGE', entry, 2, 17) ~= seen then
  return {0, 0, now_ms}
end
local held = redis.call('GET', lease)
if held and held ~= 'L' .. token then
  local states = {L = 2, F = 3, U = 4}
  local ends_ms = redis.call('PTTL', lease)
  if ends_ms < 0 then
    -- Another program has removed its expiry.
    redis.call('PEXPIRE', lease, lease_ms)
    ends_ms = lease_ms + 0
  end
  return {states[held:sub(1, 1)] or 2, ends_ms, now_ms}
end
redis.call('SET', lease, 'L' .. token, 'PX', lease_ms)
return {1, 0, now_ms}
