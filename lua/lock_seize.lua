-- lock_seize: take a lease away from whoever holds it, so that somebody else can have it.
--
-- KEYS[1]  lease    string, see lock_acquire                   prefix:2:{lock:<namespace>:<subject>}:lease
-- ARGV[1]  keep_ms  how long the last fence is remembered
-- ARGV[2]  publish  PUBLISH, or SPUBLISH on a cluster
-- ARGV[3]  channel  where those who wait for it listen, see lock_release
-- ARGV[4]  floor    the fence that is answered is no smaller than this number, which is below 2^53
--
-- Value    lease: see lock_acquire; what is left is the last fence, which is no smaller than the clock and the floor
-- Returns  {holders, fence}: so many held it, and all fences that are given out later are larger than this one
-- Errors   TOLLGATE if the value was not written by these scripts; WRONGTYPE
-- Repeat   takes it away from whoever has got it meanwhile
local lease, keep_ms, publish, channel, floor = KEYS[1], ARGV[1] + 0, ARGV[2], ARGV[3], ARGV[4] + 0

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local fence, holders = math.max(now, floor), 0
local stored = redis.call('GET', lease)
if stored then
  local held_as = stored:byte(1) or 0
  if #stored < 8 or (#stored - 8) % 34 ~= 0 or held_as < 1 or held_as > 6 then
    return redis.error_reply('TOLLGATE the value does not hold leases of version 1')
  end
  fence = math.max(fence, (struct.unpack('<I7', stored, 2)))
  -- As many turns as there are holders.
  for at = 9, #stored, 34 do
    if struct.unpack('<I7', stored, at) > now then
      holders = holders + 1
    end
  end
end
-- Where memory is full, something has to be written first that needs none.
redis.pcall('PEXPIRE', lease, keep_ms)
redis.call('SET', lease, struct.pack('<BI7', 1, fence), 'PX', keep_ms)
-- A user who may not publish still takes the lease away; those who wait look now and then.
if type(redis.pcall(publish, channel, '1')) ~= 'number' and publish == 'SPUBLISH' then
  -- Redis 6.2 does not know it.
  redis.pcall('PUBLISH', channel, '1')
end
return {holders, fence}
