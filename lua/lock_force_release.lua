-- lock_force_release: release a lease by force, whichever token holds it.
--
-- Includes server_notify
-- KEYS[1]  lease    string, see lock_acquire                   prefix:2:{lock:<name>:<key>}:lease
-- ARGV[1]  keep_ms  how long the last fence is remembered
-- ARGV[2]  publish  PUBLISH, or SPUBLISH on a cluster
-- ARGV[3]  channel  channel of the waiters, see lock_release
-- ARGV[4]  floor    the returned fence is no smaller than this number, which is below 2^53
--
-- Value    lease: see lock_acquire; only the last fence is left, no smaller than the clock and the floor
-- Returns  {holders, fence}: the number of holders, and a fence below all later ones
-- Errors   TOLLGATE if these scripts did not write the value; WRONGTYPE
-- Repeat   releases the lease of a new holder as well
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
  -- One iteration for each holder.
  for at = 9, #stored, 34 do
    if struct.unpack('<I7', stored, at) > now then
      holders = holders + 1
    end
  end
end
-- On a full server the first write of a script must need no memory.
redis.pcall('PEXPIRE', lease, keep_ms)
redis.call('SET', lease, struct.pack('<BI7', 1, fence), 'PX', keep_ms)
notify(publish, channel, '1')
return {holders, fence}
