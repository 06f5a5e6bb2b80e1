-- cache_renew: renew the lease of a load.
--
-- KEYS[1]  lease     string, see cache_claim              prefix:2:{cache:<cache>:<key>}:lease
-- ARGV[1]  token     of the load
-- ARGV[2]  lease_ms  how long the lease lasts from now on
--
-- Value    lease: unchanged
-- Returns  1 renewed; 0 the token does not hold the lease
-- Errors   WRONGTYPE
-- Repeat   renews again
local lease, token, lease_ms = KEYS[1], ARGV[1], ARGV[2]

if redis.call('GET', lease) ~= 'L' .. token then
  return 0
end
return redis.call('PEXPIRE', lease, lease_ms)
