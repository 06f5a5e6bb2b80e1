-- lock_release: give a lease back if it still belongs to the token, and tell those who wait for one.
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
-- Repeat   harmless: a token that holds no lease changes nothing
local lease, channel, token, keep_ms, publish = KEYS[1], KEYS[2], ARGV[1], ARGV[2] + 0, ARGV[3]

local stored = redis.call('GET', lease) or ''
if stored:byte(1) ~= 1 or (#stored - 8) % 34 ~= 0 then
  return {0, 0}
end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local rest, was_held, latest = nil, 0, now
-- As many turns as there are holders.
for at = 9, #stored, 34 do
  local ends, _, _, holder = struct.unpack('<I7I4I7c16', stored, at)
  if holder == token then
    rest, was_held = stored:sub(1, at - 1) .. stored:sub(at + 34), ends > now and 1 or 0
  else
    latest = math.max(latest, ends)
  end
end
if not rest then
  return {0, 0}
end
redis.call('SET', lease, rest, 'PX', math.ceil((latest - now) / 1000) + keep_ms)
-- A user who may not publish still gives the lease back; those who wait look now and then.
local listeners = redis.pcall(publish, channel, '1')
if publish == 'SPUBLISH' and type(listeners) ~= 'number' then
  -- Redis 6.2 does not know it.
  listeners = redis.pcall('PUBLISH', channel, '1')
end
if type(listeners) ~= 'number' then
  listeners = 0
end
return {was_held, listeners}
