-- delay_queue_claim: acknowledge claimed jobs, then claim jobs that are due.
--
-- Includes server_notify, delay_queue_time, delay_queue_keys, delay_queue_record, delay_queue_runs, delay_queue_unique, delay_queue_wake
-- Includes delay_queue_rare, delay_queue_settle, delay_queue_fetch, delay_queue_finish, delay_queue_reclaim, delay_queue_take
-- ARGV[4]  worker    32 hexadecimal digits, unique to the worker
-- ARGV[6]  lease_ms  length of the leases, 10 to 86400000
--
-- Returns  {finished, now_us, more, next_ms, oldest_ms, token, expired, expired_dead, ids, records, ...}. finished: a digit for each job: 0
--          gone, or its id was pushed again since; 1 as requested; 2 dead; 3 lease lost; 4 cancelled. more: 1 if more jobs are due or more
--          leases have ended.
--          next_ms: when to call again. oldest_ms: how long the oldest waiting job is due, -1 if none is. token: of the claimed jobs.
--          expired: number of ended leases. expired_dead: id and attempts of jobs that died by that. Then the claimed jobs in pairs of
--          arrays, with null for a record that is missing or of a blocked job
-- Repeat   harmless for acknowledged jobs: they are gone or lost. Jobs claimed the first time return when their leases end
local worker, lease_ms = ARGV[4], ARGV[6] + 0
-- The longest wait of a worker.
local max_wait_ms = 5000

local reply, claimed = {finished, time[1] * 1000000 + time[2], 0, 0, 0, 0, expired, expired_dead}, 0
local priority, lowest, ends = has_rare and 0 or 1, has_rare and 2 or 1, string.format('%d', later + lease_ms)
local token_bytes
-- Not the ticket of a job, because a ticket begins with a token above 0.
local filler = string.rep('\0', 72)
-- Ids without a record are no jobs. This script removes them, but looks at a bounded number of ids.
local looked = 0
while is_paused == 0 and priority <= lowest and claimed < limit and bytes < enough and looked < 512 do
  local room = math.min(limit - claimed, 64)
  local found, stored_jobs = take(priority, room)
  if #found > 0 then
    if not token_bytes then
      token = math.max(token + 1, time[1] * 1000000 + time[2])
      token_bytes = struct.pack('>I7', token)
    end
    local added, last = {}, 0
    if #found > 16 then
      -- Redis stores a hundred short members as a list, and searching it for each ticket takes longer than the rest of the script. A long
      -- member converts the list to a skip list, which stays when the member is removed.
      redis.call('ZADD', leases, now, filler)
    end
    for i = 1, #found do
      local id, record = found[i], stored_jobs[i]
      local is_blocked = false
      if record and has_cancels then
        -- A cancelled run with this id or unique key has to end first.
        local key = key_of(record)
        is_blocked = redis.call('HEXISTS', cancels, '\0' .. id) == 1 or (key and redis.call('HEXISTS', cancels, '\1' .. key) == 1)
      end
      if is_blocked then
        stored_jobs[i] = false
        redis.call('ZADD', snoozed, now + max_wait_ms, id)
        keep(snoozed, max_wait_ms + keep_ms)
      elseif record then
        added[last + 1], added[last + 2] = ends, token_bytes .. id
        last = last + 2
        if has_unique and #record > 25 and math.floor(record:byte(14) / 4) % 4 == 2 then
          release_key(record:sub(27, 26 + record:byte(22)), id)
        end
      end
    end
    reply[#reply + 1], reply[#reply + 2], claimed = found, stored_jobs, claimed + last / 2
    looked = looked + #found
    if last > 0 then
      redis.call('ZADD', leases, unpack(added))
    end
    if #found > 16 then
      redis.call('ZREM', leases, filler)
    end
  end
  if #found < room then
    priority = priority + 1
  end
end
if claimed > 0 then
  keep(leases, lease_ms + keep_ms)
  keep(jobs, lease_ms + keep_ms + 86400000)
  if has_unique then
    keep(unique, lease_ms + keep_ms)
  end
end

-- The next due time.
local next, more, oldest = max_wait_ms, 0, -1
local sets = {[-1] = snoozed, [0] = high, low, normal, runs, leases}
for i = has_rare and -1 or 2, 4 do
  local head = redis.call('ZRANGE', sets[i], 0, 0, 'WITHSCORES')[2]
  if head then
    local is_open = i == 4 or is_paused == 0
    next = is_open and math.min(next, math.max(head - now, 0)) or next
    if head + 0 <= now then
      more = is_open and 1 or more
      oldest = i < 4 and math.max(oldest, now - head) or oldest
      -- Keys must outlive overdue jobs.
      keep(sets[i], keep_ms / 2)
      if claimed == 0 then
        keep(jobs, keep_ms / 2 + 86400000)
      end
      if has_unique then
        keep(unique, keep_ms / 2)
      end
    end
  end
end

-- One waiting worker is the timekeeper. The others need not look at the next due time.
local is_waiting, soonest = claimed < limit and more == 0, now + next
local has_idle = has_rare and redis.call('EXISTS', idle) == 1
if has_idle then
  redis.call('ZREM', idle, worker)
end
if is_waiting and (keeper == '' or keeper == worker or wakes_at + 1000 < now) then
  keeper, wakes_at = worker, soonest
elseif is_waiting then
  next, has_idle = max_wait_ms, true
  -- On a full server the first write of a script must need no memory, here and below.
  redis.call('ZREMRANGEBYSCORE', idle, '-inf', now - 3 * max_wait_ms)
  redis.call('ZADD', idle, now, worker)
  redis.call('PEXPIRE', idle, 12 * max_wait_ms)
  -- The timekeeper may have died, so a few other workers look shortly after a job is due or a lease ends, at different times. Of many
  -- workers these are different ones each time.
  local chance = tonumber(worker:sub(1, 8), 16)
  if (chance + now) % redis.call('ZCARD', idle) < 8 then
    next = math.min(max_wait_ms, soonest - now + 200 + chance % 150)
  end
elseif keeper == worker then
  keeper = ''
end
-- The woken worker wakes the next one if needed.
if soonest < now + max_wait_ms and (keeper ~= '' or has_idle) then
  keeper, wakes_at = wake_worker(publish, wake, idle, keeper, wakes_at, soonest)
end
local changed = struct.pack('<BBI7I6', 1, is_paused, token, wakes_at) .. keeper
-- Tokens keep rising if the clock is set back by up to ten minutes. A pause lasts as long as its jobs.
local lasts = is_paused == 0 and 600000 or math.max(redis.call('PTTL', jobs), redis.call('PTTL', state), keep_ms)
if changed ~= stored then
  redis.call('PEXPIRE', state, lasts)
  redis.call('SET', state, changed, 'PX', lasts)
elseif is_paused == 1 or is_waiting then
  redis.call('PEXPIRE', state, lasts)
end
reply[3], reply[4], reply[5], reply[6] = more, next, oldest, token
return reply
