-- lock_release: give the lease back if it still belongs to the token, and tell those who wait for it.
--
-- KEYS[1]  lease    string, see lock_acquire                   prefix:2:{lock:<namespace>:<subject>}:lease
-- KEYS[2]  channel  where those who wait for it listen         prefix:2:{lock:<namespace>:<subject>}:free
-- ARGV[1]  token    of the acquisition
-- ARGV[2]  keep_ms  how long the last fence is remembered
-- ARGV[3]  publish  PUBLISH, or SPUBLISH on a cluster
--
-- Value    lease: see lock_acquire
-- Returns  {1, listeners} given back; {0, listeners} it had ended already; {0, 0} it is not this token's
-- Errors   WRONGTYPE
-- Repeat   harmless: a token that does not hold the lease changes nothing
local lease, channel, token, keep_ms, publish = KEYS[1], KEYS[2], ARGV[1], ARGV[2] + 0, ARGV[3]

local stored = redis.call('GET', lease) or ''
if #stored ~= 35 or stored:byte(1) ~= 1 or stored:sub(20) ~= token then
  return {0, 0}
end
local time = redis.call('TIME')
local fence, ends = struct.unpack('<I7I7', stored, 2)
redis.call('SET', lease, struct.pack('<BI7I7I4', 1, fence, 0, 0), 'PX', keep_ms)
-- A user who may not publish still gives the lease back; those who wait look now and then.
local listeners = redis.pcall(publish, channel, '1')
if publish == 'SPUBLISH' and type(listeners) ~= 'number' then
  -- Redis 6.2 does not know it.
  listeners = redis.pcall('PUBLISH', channel, '1')
end
if type(listeners) ~= 'number' then
  listeners = 0
end
return {ends > time[1] * 1000000 + time[2] and 1 or 0, listeners}
