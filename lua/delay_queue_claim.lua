-- delay_queue_claim: acknowledge claimed jobs, then claim jobs that are due.
--
-- Includes delay_queue_time, delay_queue_keys, delay_queue_record, delay_queue_runs, delay_queue_wake
-- ARGV[4]  worker    32 hexadecimal digits, unique to the worker
-- ARGV[5]  limit     how many jobs to claim, 0 to 256; a worker that gets fewer waits for more
-- ARGV[6]  lease_ms  length of the leases, 10 to 86400000
-- ARGV[7]  dead_max  how many dead jobs are kept
-- ARGV[8]  dead_ms   for how long
-- ARGV[9]  done      number of jobs done or cancelled by their worker, at most 256 with the others
-- ARGV[10]  others   number of jobs acknowledged otherwise
-- ARGV[11]  first    the tickets of done jobs; then ticket, kind, delay and error of each other job. Kinds: 1 retry after `delay` ms,
--                    2 snooze for `delay` ms, 3 release, 4 dead for the reason `delay`. Then the number of done jobs that are unique,
--                    and for each its position from 1, negative to release a timed unique key, and the key
--
-- Returns  {finished, now_us, more, next_ms, oldest_ms, token, expired, expired_dead, ids, records, ...}. finished: a digit for each job: 0
--          gone, or its id was pushed again since; 1 as requested; 2 dead; 3 lease lost; 4 cancelled. more: 1 if more jobs are due.
--          next_ms: when to call again. oldest_ms: how long the oldest waiting job is due, -1 if none is. token: of the claimed jobs.
--          expired: number of ended leases. expired_dead: id and attempts of jobs that died by that. Then the claimed jobs in pairs of
--          arrays, with an empty string for a missing record
-- Repeat   harmless for acknowledged jobs: they are gone or lost. Jobs claimed the first time return when their leases end
local worker, limit = ARGV[4], math.min(ARGV[5] + 0, 256)
local lease_ms, dead_max, dead_ms = ARGV[6] + 0, ARGV[7] + 0, ARGV[8] + 0
local done, first = math.min(ARGV[9] + 0, 256), 11
local others = math.min(ARGV[10] + 0, 256 - done)
-- Locals for functions that are called for each job.
local cut, unpack = string.sub, unpack
-- The longest wait of a worker.
local patience = 5000

-- Pending writes, as arguments of commands: records, due times by priority, snoozed and dead jobs; and pending removals.
local records, waiting, asleep, died, gone = {}, {[0] = {}, {}, {}}, {}, {}, {}
local latest = now
-- Usually empty: one command finds that out.
local has_rare = redis.call('EXISTS', high, low, dead, unique, cancels, snoozed, idle) > 0
local has_unique = has_rare and redis.call('EXISTS', unique) == 1
local has_cancels = has_rare and redis.call('EXISTS', cancels) == 1
if has_cancels and redis.call('EXISTS', leases) == 0 and redis.call('HLEN', cancels) > 0 then
  -- If a full server evicted the leases, no cancelled run would ever end. HLEN fails on a foreign key.
  redis.call('DEL', cancels)
  has_cancels = false
end

-- Releases the unique key of a job. A timed key stays unless `ends_time`.
local function free(key, id, ends_time)
  local holder = redis.call('HGET', unique, key)
  if holder and holder:sub(7) == id and (ends_time or holder:sub(1, 6) == '\0\0\0\0\0\0') then
    redis.call('HDEL', unique, key)
  end
end

-- Returns a snoozed job to its due set, and the number of bytes read.
local function resume(id)
  local record = redis.call('ZREM', snoozed, id) == 1 and redis.call('HGET', jobs, id)
  if record then
    -- An unreadable record is claimed as well, and dies in the end.
    local score, set = now, normal
    if is_job(record) then
      score, set = struct.unpack('>I6', record, 8), due[record:byte(14) % 4]
    end
    redis.call('ZADD', set, score, id)
    keep(set, math.max(score - now, 0) + keep_ms)
  end
  return record and #record or 0
end

-- Ends the run of a cancelled job, so that a job with its id or unique key can be claimed. Returns whether the job was cancelled.
local function end_cancelled(id)
  local record = has_cancels and redis.call('HGET', cancels, '\0' .. id)
  if not record then
    return false
  end
  redis.call('HDEL', cancels, '\0' .. id)
  resume(id)
  local key = key_of(record)
  if key and redis.call('HGET', cancels, '\1' .. key) == id then
    redis.call('HDEL', cancels, '\1' .. key)
    local holder = redis.call('HGET', unique, key)
    local ends_at = holder and struct.unpack('>I6', holder)
    -- A hold whose time has ended is none.
    if holder and (ends_at == 0 or ends_at > now) then
      resume(holder:sub(7))
    end
  end
  return true
end

-- Whether the run of a cancelled job blocks this job.
local function is_held_up(id, record)
  local key = has_cancels and key_of(record)
  return has_cancels and (redis.call('HEXISTS', cancels, '\0' .. id) == 1 or (key and redis.call('HEXISTS', cancels, '\1' .. key) == 1))
end

-- Ends an attempt of a job that is not done; kind 5 is an expired lease. Returns the digit of `finished`.
local function settle(id, record, kind, delay, failure)
  if #record < 26 or record:byte(1) ~= 1 or record:byte(14) % 4 > 2 then
    -- An unreadable job must not block others.
    died[#died + 1], died[#died + 2] = now, id
    return '2'
  end
  if kind == 2 then
    -- Keep its due time, so that it precedes jobs with later due times when it returns.
    local wakes_at = delay == 0 and now or later + delay
    asleep[#asleep + 1], asleep[#asleep + 2] = wakes_at, id
    latest = math.max(latest, wakes_at)
    return '1'
  end
  local score, flags, max, attempts, reason, error_len, key_len, headers = struct.unpack('>I6BHHBHBI4', record, 8)
  local key, rest = record:sub(27, 26 + key_len), record:sub(27 + key_len + error_len)
  local message = record:sub(27 + key_len, 26 + key_len + error_len)
  if kind == 1 or kind > 3 then
    attempts, message = math.min(attempts + 1, 65535), failure:sub(1, 1024)
    reason = kind == 4 and delay or kind == 5 and 2 or 1
  end
  local is_dead = kind == 4 or (kind ~= 3 and attempts >= max)
  if kind == 5 or (kind == 1 and delay == 0) then
    score = now
  elseif kind == 1 then
    score = later + delay
  end
  records[#records + 1] = id
  records[#records + 1] = record:sub(1, 7)
    .. struct.pack('>I6BHHBHBI4', score, flags, max, attempts, reason, #message, key_len, headers) .. key .. message .. rest
  local list = is_dead and died or waiting[flags % 4]
  list[#list + 1] = is_dead and now or score
  list[#list + 1] = id
  if is_dead and flags > 3 then
    free(key, id)
  end
  latest = math.max(latest, score)
  return is_dead and '2' or '1'
end

local function write()
  if #gone > 0 then
    redis.call('HDEL', jobs, unpack(gone))
  end
  has_rare = has_rare or #records + #asleep + #died > 0
  if #records > 0 then
    redis.call('HSET', jobs, unpack(records))
  end
  if #asleep > 0 then
    redis.call('ZADD', snoozed, unpack(asleep))
    keep(snoozed, latest - now + keep_ms)
  end
  if #records + #asleep > 0 then
    keep(jobs, latest - now + keep_ms + 86400000)
    if has_unique then
      keep(unique, latest - now + keep_ms)
    end
  end
  for priority = 0, 2 do
    if #waiting[priority] > 0 then
      redis.call('ZADD', due[priority], unpack(waiting[priority]))
      keep(due[priority], latest - now + keep_ms)
    end
  end
  if #died > 0 then
    redis.call('ZADD', dead, unpack(died))
    keep(dead, keep_ms)
  end
  records, waiting, asleep, died, gone = {}, {[0] = {}, {}, {}}, {}, {}, {}
end

-- Bytes of records to read at a time, plus one record.
local enough = 1048576

-- Acknowledge.
local finished, tickets, ids, cancelled = '', {unpack(ARGV, first, first + done - 1)}, {}, {}
for i = 1, others do
  tickets[done + i] = ARGV[first + done + 4 * (i - 1)]
end
for i = 1, done + others do
  ids[i] = cut(tickets[i], 8)
end
if #tickets > 0 then
  local ends = redis.call('ZMSCORE', leases, unpack(tickets))
  local there = others > 0 and redis.call('HMGET', jobs, unpack(ids, done + 1))
  local removed = redis.call('ZREM', leases, unpack(tickets))
  if others == 0 and removed == done and not has_cancels then
    -- The common case: all jobs are done, each lease was held, and none is repeated.
    gone, finished = ids, string.rep('1', done)
    write()
  else
    local answers, seen = {}, {}
    for i = 1, done + others do
      if ends[i] and not seen[tickets[i]] then
        seen[tickets[i]], answers[i] = true, '1'
        cancelled[i] = end_cancelled(ids[i])
        if cancelled[i] then
          answers[i] = i <= done and '1' or '4'
        elseif i <= done then
          gone[#gone + 1] = ids[i]
        elseif not there[i - done] then
          answers[i] = '0'
        else
          local at = first + done + 4 * (i - done - 1)
          answers[i] = settle(ids[i], there[i - done], ARGV[at + 1] + 0, ARGV[at + 2] + 0, ARGV[at + 3])
        end
      end
    end
    write()
    local looked_at = 0
    for i = 1, done + others do
      if not answers[i] then
        local record = i <= done and looked_at < enough and redis.call('HGET', jobs, ids[i]) or ''
        looked_at = looked_at + #record
        -- A job that was pushed after the ticket was issued is another job.
        local is_other = #record > 25 and struct.unpack('>I6', record, 2) * 1000 > struct.unpack('>I7', tickets[i])
        answers[i] = not is_other and redis.call('HEXISTS', jobs, ids[i]) == 1 and '3' or '0'
      end
    end
    finished = table.concat(answers)
  end
  local at = first + done + 4 * others
  for i = 1, math.min(ARGV[at] + 0, done) do
    local ends_time = ARGV[at + 2 * i - 1] + 0 < 0
    local place = math.abs(ARGV[at + 2 * i - 1])
    if finished:sub(place, place) == '1' and not cancelled[place] then
      free(ARGV[at + 2 * i], ids[place], ends_time)
    end
  end
end

local read, bytes = 0, 0

-- Reads records up to the byte limit, and returns them and their number. Starts with one record and estimates the size of the next ones;
-- a few small records are no basis for that.
local function fetch(ids)
  local found, count = {}, 0
  while count < #ids and bytes < enough do
    local size = math.min(4 * read, math.floor((enough - bytes) * read / math.max(bytes, 1)), #ids - count)
    local part = redis.call('HMGET', jobs, unpack(ids, count + 1, count + math.max(size, 1)))
    for i = 1, #part do
      found[count + i] = part[i]
      bytes = bytes + (part[i] and #part[i] or 0)
    end
    count, read = count + #part, read + #part
  end
  return found, count
end

-- Return jobs with expired leases, then claim.
local reply, claimed = {finished, time[1] * 1000000 + time[2], 0, 0, 0, 0, 0, {}}, 0
if limit > 0 then
  local over = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, 64)
  if #over > 0 then
    local expired = {}
    for i = 1, #over do
      expired[i] = over[i]:sub(8)
    end
    local there, count = fetch(expired)
    for i = 1, count do
      if end_cancelled(expired[i]) then
        reply[7] = reply[7] + 1
      elseif there[i] then
        reply[7] = reply[7] + 1
        if settle(expired[i], there[i], 5, 0, '') == '2' then
          local attempts = #there[i] > 25 and struct.unpack('>H', there[i], 17) + 1 or 0
          reply[8][#reply[8] + 1], reply[8][#reply[8] + 2] = expired[i], attempts
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

-- Removes the first due jobs of one priority from their sets, and returns them with their records.
local function take(priority, room)
  local whole = {}
  if priority == 1 then
    whole = redis.call('ZRANGEBYSCORE', runs, '-inf', now, 'WITHSCORES', 'LIMIT', 0, math.ceil(room / 16))
  end
  if #whole == 0 then
    local found = redis.call('ZRANGEBYSCORE', due[priority], '-inf', now, 'LIMIT', 0, room)
    local stored_jobs, count = fetch(found)
    if count > 0 then
      redis.call('ZREMRANGEBYRANK', due[priority], 0, count - 1)
    end
    return count < #found and {unpack(found, 1, count)} or found, stored_jobs
  end
  local singles = redis.call('ZRANGEBYSCORE', normal, '-inf', now, 'WITHSCORES', 'LIMIT', 0, room)
  -- Merge both sets: how many jobs, how far into either set, and the rest of a run.
  local function merge(most)
    local found, count, left, single, run = {}, 0, {}, 1, 1
    while count < most and (singles[single] or whole[run]) do
      local id, first_id, comes, score = singles[single], whole[run], singles[single + 1], whole[run + 1]
      if not score or (comes and (comes == score and is_before(id, first_id) or comes - score < 0)) then
        count, single = count + 1, single + 2
        found[count] = id
      else
        local its = jobs_of(first_id)
        local fits = math.min(most - count, 16)
        for i = 1, fits do
          found[count + i] = its[i]
        end
        -- The rest of the run waits as single jobs.
        for i = fits + 1, 16 do
          left[#left + 1], left[#left + 2] = score, its[i]
        end
        count, run = count + fits, run + 2
      end
    end
    return found, left, single, run
  end
  local found, left, single, run = merge(room)
  local stored_jobs, count = fetch(found)
  if count < #found then
    found, left, single, run = merge(count)
  end
  if single > 1 then
    redis.call('ZREMRANGEBYRANK', normal, 0, (single - 1) / 2 - 1)
  end
  if run > 1 then
    redis.call('ZREMRANGEBYRANK', runs, 0, (run - 1) / 2 - 1)
  end
  if #left > 0 then
    redis.call('ZADD', normal, unpack(left))
    keep(normal, keep_ms)
  end
  return found, stored_jobs
end

local priority, lowest, ends = has_rare and 0 or 1, has_rare and 2 or 1, string.format('%d', later + lease_ms)
local token_bytes
-- No ticket: tokens are above 0.
local filler = string.rep('\0', 72)
-- Ids without a record are no jobs. Remove them: there may be any number.
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
      -- member converts the list to a tree, and the tree stays after its removal.
      redis.call('ZADD', leases, now, filler)
    end
    for i = 1, #found do
      local id, record = found[i], stored_jobs[i]
      if record and is_held_up(id, record) then
        stored_jobs[i] = false
        redis.call('ZADD', snoozed, now + patience, id)
        keep(snoozed, patience + keep_ms)
      elseif record then
        added[last + 1], added[last + 2] = ends, token_bytes .. id
        last = last + 2
        if has_unique and #record > 25 and math.floor(record:byte(14) / 4) % 4 == 2 then
          free(record:sub(27, 26 + record:byte(22)), id)
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
local next, more, oldest = patience, 0, -1
local places = {[-1] = snoozed, [0] = high, low, normal, runs, leases}
for i = has_rare and -1 or 2, 4 do
  local head = redis.call('ZRANGE', places[i], 0, 0, 'WITHSCORES')[2]
  if head then
    local is_open = i == 4 or is_paused == 0
    next = is_open and math.min(next, math.max(head - now, 0)) or next
    if head + 0 <= now then
      more = is_open and 1 or more
      oldest = i < 4 and math.max(oldest, now - head) or oldest
      -- Keys must outlive overdue jobs.
      keep(places[i], keep_ms / 2)
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
  next, has_idle = patience, true
  -- On a full server the first write of a script must need no memory, here and below.
  redis.call('ZREMRANGEBYSCORE', idle, '-inf', now - 3 * patience)
  redis.call('ZADD', idle, now, worker)
  redis.call('PEXPIRE', idle, 12 * patience)
  -- The timekeeper may have died, so a few other workers look shortly after a job is due or a lease ends, at different times. Of many
  -- workers these are different ones each time.
  local chance = tonumber(worker:sub(1, 8), 16)
  if (chance + now) % redis.call('ZCARD', idle) < 8 then
    next = math.min(patience, soonest - now + 200 + chance % 150)
  end
elseif keeper == worker then
  keeper = ''
end
-- The woken worker wakes the next one if needed.
if soonest < now + patience and (keeper ~= '' or has_idle) then
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
