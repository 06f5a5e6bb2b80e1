-- delay_queue_reclaim: return jobs whose lease or snooze has ended, and remove old dead jobs.
--
-- ARGV[5]  limit     how many jobs to claim, 0 to 256; a worker that gets fewer waits for more
-- ARGV[7]  dead_max  how many dead jobs are kept
-- ARGV[8]  dead_ms   for how long
local limit, dead_max, dead_ms = math.min(ARGV[5] + 0, 256), ARGV[7] + 0, ARGV[8] + 0

-- For the reply: the number of ended leases, and id and attempts of jobs that died by that.
local expired, expired_dead = 0, {}
if limit > 0 then
  local over = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, 64)
  if #over > 0 then
    local ids = {}
    for i = 1, #over do
      ids[i] = over[i]:sub(8)
    end
    local there, count = fetch(ids)
    for i = 1, count do
      if end_cancelled(ids[i]) then
        expired = expired + 1
      elseif there[i] then
        expired = expired + 1
        if settle(ids[i], there[i], 5, 0, '') == '2' then
          local attempts = #there[i] > 25 and struct.unpack('>H', there[i], 17) + 1 or 0
          expired_dead[#expired_dead + 1], expired_dead[#expired_dead + 2] = ids[i], attempts
        end
      end
    end
    redis.call('ZREM', leases, unpack(over, 1, count))
    write()
    read, bytes = 0, 0
  end
  -- At least as many as can be claimed.
  local awake = has_rare and redis.call('ZRANGEBYSCORE', snoozed, '-inf', now, 'LIMIT', 0, math.max(limit, 64)) or {}
  local resumed = 0
  for i = 1, #awake do
    if resumed >= enough then
      break
    end
    resumed = resumed + resume(awake[i])
  end
  local rotten = has_rare and redis.call('ZRANGEBYSCORE', dead, '-inf', now - dead_ms, 'LIMIT', 0, 64) or {}
  local excess = has_rare and redis.call('ZCARD', dead) - #rotten - dead_max or 0
  if excess > 0 then
    local oldest = redis.call('ZRANGE', dead, #rotten, #rotten + math.min(excess, 320) - 1)
    for i = 1, #oldest do
      rotten[#rotten + 1] = oldest[i]
    end
  end
  if #rotten > 0 then
    redis.call('ZREM', dead, unpack(rotten))
    redis.call('HDEL', jobs, unpack(rotten))
  end
end
