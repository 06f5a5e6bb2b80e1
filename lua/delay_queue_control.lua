-- delay_queue_control: inspect and administer the jobs of a queue.
--
-- KEYS[1]  jobs      hash of records, see delay_queue_push                            prefix:2:{delay_queue:<name>}:jobs
-- KEYS[2]  high      sorted set of ids by when they are due in ms                     prefix:2:{delay_queue:<name>}:due:high
-- KEYS[3]  normal    likewise                                                         prefix:2:{delay_queue:<name>}:due:normal
-- KEYS[4]  low       likewise                                                         prefix:2:{delay_queue:<name>}:due:low
-- KEYS[5]  leases    sorted set of tickets, see delay_queue_claim                     prefix:2:{delay_queue:<name>}:leases
-- KEYS[6]  dead      sorted set of ids by when they died in ms                        prefix:2:{delay_queue:<name>}:dead
-- KEYS[7]  unique    hash of holders by unique key, see delay_queue_push              prefix:2:{delay_queue:<name>}:unique
-- KEYS[8]  cancels   hash of cancelled jobs that are running, see delay_queue_claim    prefix:2:{delay_queue:<name>}:cancels
-- KEYS[9]  state     string, see delay_queue_claim                                    prefix:2:{delay_queue:<name>}:state
-- KEYS[10]  idle     sorted set of workers, see delay_queue_claim                     prefix:2:{delay_queue:<name>}:idle
-- KEYS[11]  runs     sorted set of runs by when they are due in ms, see delay_queue_push  prefix:2:{delay_queue:<name>}:runs
-- KEYS[12]  snoozed  sorted set of ids, see delay_queue_claim                           prefix:2:{delay_queue:<name>}:snoozed
-- ARGV[1]  keep_ms   how long keys outlive their last entry, at most 2^40
-- ARGV[2]  publish   PUBLISH, or SPUBLISH on a cluster
-- ARGV[3]  wake      prefix of the channels of workers
-- ARGV[4]  verb      get, cancel, reschedule, replace, counts, list, pause, purge, release_unique, replay or forget
-- ARGV[5]  first     get: id. cancel: id, 1 to keep a timed unique key or 0. reschedule: id, `when` as in delay_queue_push. replace: id,
--                    payload. list: 1 waiting, 2 running or 3 dead, how many to skip, how many to list. pause: 1 or 0. purge: how many,
--                    1 or 0 as with cancel. release_unique: key. replay, forget: at most 256 ids
--
-- Value    see delay_queue_claim and delay_queue_push
-- Returns  get: {} or {state, record}: 1 waiting, 2 running, 3 dead; a snoozed job is due when it returns, as in list. cancel, reschedule,
--          replace: 0 no such job, 1 done, 2 running (a cancelled job: its worker is notified), 3 dead. counts: {waiting, due, running,
--          dead, oldest_ms (-1 if none is due), is_paused}. list: {id, record, ...}. pause: 1. purge: how many. release_unique: 1 it was
--          held, or 0. replay, forget: 1 or 0 for each id. A job whose unique key another job holds is not replayed. After 1 MiB of
--          records the other ids have no answer
-- Errors   TOLLGATE if these scripts did not write the state, or the job to cancel; WRONGTYPE
-- Repeat   harmless: a removed job stays removed; a delay counts from the last call
local jobs, high, normal, low, leases, dead = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local unique, cancels, state, idle, runs, snoozed = KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[12]
local keep_ms, publish, wake, verb, first = ARGV[1] + 0, ARGV[2], ARGV[3], ARGV[4], 5

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local later = time[2] % 1000 > 0 and now + 1 or now
local due = {[0] = high, normal, low}

local function keep(key, ms)
  if redis.call('PTTL', key) < ms then
    redis.call('PEXPIRE', key, ms + 86400000)
  end
end

-- Number of notified workers. Without the right to publish, workers poll.
local function tell(worker)
  local told = redis.pcall(publish, wake .. worker, '1')
  if publish == 'SPUBLISH' and type(told) ~= 'number' then
    -- Redis 6.2 lacks SPUBLISH, and its PUBLISH counts only this node.
    told = type(redis.pcall('PUBLISH', wake .. worker, '1')) == 'number' and 1
  end
  return type(told) == 'number' and told or 0
end

local stored = redis.call('GET', state) or '\1\0\0\0\0\0\0\0\0\0\0\0\0\0\0'
if #stored < 15 or stored:byte(1) ~= 1 then
  return redis.error_reply('TOLLGATE the value does not hold the state of a queue of version 1')
end
local is_paused, token, wakes_at = struct.unpack('<BI7I6', stored, 2)
local keeper = stored:sub(16)

-- Wake the timekeeper if it would look too late, or another waiting worker if there is none.
local function wake_for(score)
  local has_keeper = keeper ~= '' and wakes_at + 1000 >= now
  if is_paused == 0 and not (has_keeper and score >= wakes_at) then
    local told = has_keeper and tell(keeper) or 0
    for _ = 1, 4 do
      local next = told == 0 and redis.call('ZPOPMIN', idle)[1]
      if not next then
        break
      end
      keeper, told = next, tell(next)
    end
    if told > 0 then
      wakes_at = now
    end
  end
  -- A pause lasts as long as its jobs.
  local lasts = is_paused == 0 and 600000 or math.max(redis.call('PTTL', jobs), redis.call('PTTL', state), keep_ms)
  -- On a full server the first write of a script must need no memory.
  redis.call('PEXPIRE', state, lasts)
  redis.call('SET', state, struct.pack('<BBI7I6', 1, is_paused, token, wakes_at) .. keeper, 'PX', lasts)
end

-- A record with another due time.
local function due_at(record, score)
  return record:sub(1, 7) .. struct.pack('>I6', score) .. record:sub(14)
end

-- Foreign data is left alone.
local function is_job(record)
  return #record > 25 and record:byte(1) == 1 and record:byte(14) % 4 < 3
end

-- Releases the unique key of a job. A timed key stays if `keeps` is '1', or if it outlives a cancellation. Returns the key if the job
-- held it. A hold whose time has ended is none.
local function free(record, id, keeps)
  local key = is_job(record) and record:byte(14) > 3 and record:sub(27, 26 + record:byte(22))
  local holder = key and redis.call('HGET', unique, key)
  local is_kept = keeps == '1' or (key and record:byte(14) > 15)
  if holder and holder:sub(7) == id and (not is_kept or holder:sub(1, 6) == '\0\0\0\0\0\0') then
    redis.call('HDEL', unique, key)
    local ends_at = struct.unpack('>I6', holder)
    return (ends_at == 0 or ends_at > now) and key
  end
end

-- Takes the unique key of a job again, unless another job holds it. Returns whether the job may exist.
local function hold(record, id)
  if math.floor(record:byte(14) / 4) % 4 ~= 1 then
    return true
  end
  local key = record:sub(27, 26 + record:byte(22))
  local holder = redis.call('HGET', unique, key)
  local ends_at, its = holder and struct.unpack('>I6', holder) or 0, holder and holder:sub(7)
  -- A holder whose job was evicted blocks no other job.
  if ends_at > now or (holder and ends_at == 0 and its ~= id and redis.call('HEXISTS', jobs, its) == 1) then
    return false
  end
  redis.call('HSET', unique, key, '\0\0\0\0\0\0' .. id)
  keep(unique, keep_ms)
  return true
end

local signs = '0123456789ABCDEFGHJKMNPQRSTVWXYZ'

-- The ids of the jobs of a run.
local function jobs_of(run)
  local stem, from, found = run:sub(1, -2), signs:find(run:sub(-1), 1, true), {}
  for i = from, from + 15 do
    found[#found + 1] = stem .. signs:sub(i, i)
  end
  return found
end

-- Splits a run into single waiting jobs.
local function break_up(run)
  local score, members, found = redis.call('ZSCORE', runs, run), {}, jobs_of(run)
  for i = 1, #found do
    members[2 * i - 1], members[2 * i] = score, found[i]
  end
  redis.call('ZREM', runs, run)
  redis.call('ZADD', normal, unpack(members))
  local lasts = math.max(score - now, 0) + keep_ms
  keep(normal, lasts)
  keep(jobs, lasts + 86400000)
end

-- 0 no such job, 1 waiting, 2 running, 3 dead; with its record, its set and its run.
local function find(id)
  local record = redis.call('HGET', jobs, id)
  if not record then
    record = redis.call('HGET', cancels, '\0' .. id)
    return record and 2 or 0, record
  end
  if is_job(record) and redis.call('ZSCORE', snoozed, id) then
    return 1, record, snoozed
  end
  local place = is_job(record) and due[record:byte(14) % 4]
  if place and redis.call('ZSCORE', place, id) then
    return 1, record, place
  end
  local sign = place == normal and signs:find(id:sub(-1), 1, true)
  local run = sign and id:sub(1, -2) .. (sign > 16 and 'G' or '0')
  if run and redis.call('ZSCORE', runs, run) then
    return 1, record, place, run
  end
  return redis.call('ZSCORE', dead, id) and 3 or 2, record, place
end

if verb == 'get' then
  local is, record, place = find(ARGV[first])
  if place == snoozed then
    record = due_at(record, redis.call('ZSCORE', snoozed, ARGV[first]))
  end
  return is > 0 and {is, record} or {}
end

if verb == 'cancel' then
  local id = ARGV[first]
  local is, record, place, run = find(id)
  if run then
    break_up(run)
  end
  if is == 1 then
    redis.call('ZREM', place, id)
    redis.call('HDEL', jobs, id)
    free(record, id, ARGV[first + 1])
  elseif is == 2 and not is_job(record) then
    -- Its lease may be gone, so no expiry would end it.
    return redis.error_reply('TOLLGATE the value does not hold a job of version 1')
  elseif is == 2 and redis.call('HDEL', jobs, id) == 1 then
    redis.call('HSET', cancels, '\0' .. id, record)
    local key = free(record, id, ARGV[first + 1])
    if key then
      redis.call('HSET', cancels, '\1' .. key, id)
    end
    keep(cancels, keep_ms)
  end
  return is
end

if verb == 'reschedule' then
  local id, when = ARGV[first], ARGV[first + 1] + 0
  local is, record, place, run = find(id)
  if run then
    break_up(run)
  end
  if is == 1 then
    local score = now
    if when > 0 then
      score = later + when
    elseif when < 0 then
      score = math.max(now, -when)
    end
    redis.call('ZREM', place, id)
    place = due[record:byte(14) % 4]
    redis.call('HSET', jobs, id, due_at(record, score))
    redis.call('ZADD', place, score, id)
    keep(place, score - now + keep_ms)
    keep(jobs, score - now + keep_ms + 86400000)
    keep(unique, score - now + keep_ms)
    wake_for(score)
  end
  return is
end

if verb == 'replace' then
  local id = ARGV[first]
  local is, record = find(id)
  if is == 1 then
    local error_len, key_len, headers = struct.unpack('>HBI4', record, 20)
    redis.call('HSET', jobs, id, record:sub(1, 26 + key_len + error_len + headers) .. ARGV[first + 1])
  end
  return is
end

if verb == 'counts' then
  local waiting, ready, oldest, places = 0, 0, -1, {high, normal, low, snoozed, runs}
  for i = 1, 5 do
    local each = i == 5 and 16 or 1
    waiting = waiting + each * redis.call('ZCARD', places[i])
    ready = ready + each * redis.call('ZCOUNT', places[i], '-inf', now)
    local head = redis.call('ZRANGE', places[i], 0, 0, 'WITHSCORES')[2]
    oldest = head and math.max(oldest, now - head) or oldest
  end
  return {waiting, ready, redis.call('ZCARD', leases), redis.call('ZCARD', dead), oldest, is_paused}
end

-- Compares ids of one score by bytes, as a sorted set does. Lua's `<` uses the collation locale of the server.
local function is_before(one, other)
  for i = 1, math.min(#one, #other) do
    local byte, its = string.byte(one, i), string.byte(other, i)
    if byte ~= its then
      return byte < its
    end
  end
  return #one < #other
end

-- Number of jobs of normal priority ahead of the run at position `number`.
local function ahead(number)
  local run = redis.call('ZRANGE', runs, number, number, 'WITHSCORES')
  local from = redis.call('ZCOUNT', normal, '-inf', '(' .. run[2])
  local to = from + redis.call('ZCOUNT', normal, run[2], run[2])
  while from < to do
    local middle = math.floor((from + to) / 2)
    if is_before(redis.call('ZRANGE', normal, middle, middle)[1], run[1]) then
      from = middle + 1
    else
      to = middle
    end
  end
  return 16 * number + from
end

-- At most 64 waiting jobs of normal priority, from a position on.
local function waiting_from(skip, room)
  -- Number of runs up to that position.
  local from, to = 0, redis.call('ZCARD', runs)
  while from < to do
    local middle = math.floor((from + to) / 2)
    if ahead(middle) <= skip then
      from = middle + 1
    else
      to = middle
    end
  end
  local number, found = from, {}
  local singles = skip - 16 * number
  if number > 0 then
    local begun = ahead(number - 1)
    if skip < begun + 16 then
      local its = jobs_of(redis.call('ZRANGE', runs, number - 1, number - 1)[1])
      found = {unpack(its, skip - begun + 1, math.min(skip - begun + room, 16))}
      singles = begun - 16 * (number - 1)
    end
  end
  while #found < room do
    local run = redis.call('ZRANGE', runs, number, number)[1]
    local gap = run and ahead(number) - 16 * number - singles or room
    local between = gap > 0 and redis.call('ZRANGE', normal, singles, singles + math.min(gap, room - #found) - 1) or {}
    local its = run and #between == gap and jobs_of(run) or {}
    if #between + #its == 0 then
      break
    end
    singles, number = singles + #between, number + 1
    for i = 1, #between + #its do
      found[#found + 1] = #found < room and (between[i] or its[i - #between]) or nil
    end
  end
  return found
end

if verb == 'list' then
  local places = ({{[0] = high, normal, low, snoozed}, {[0] = leases}, {[0] = dead}})[ARGV[first] + 0]
  local has_cancels = places[0] == leases and redis.call('EXISTS', cancels) == 1
  local skip, count, cut = ARGV[first + 1] + 0, math.min(ARGV[first + 2] + 0, 256), ARGV[first] == '2' and 8 or 1
  local listed, bytes, at, looked = {}, 0, 0, 0
  while places[at] and #listed < 2 * count and bytes < 1048576 and looked < 1024 do
    local room = math.min(count - #listed / 2, 64)
    local has_runs = places[at] == normal and redis.call('EXISTS', runs) == 1
    local found = has_runs and waiting_from(skip, room) or redis.call('ZRANGE', places[at], skip, skip + room - 1)
    local stale, removed = {}, 0
    for i = 1, #found do
      local id = found[i]:sub(cut)
      local record = has_cancels and redis.call('HGET', cancels, '\0' .. id) or redis.call('HGET', jobs, id)
      if record and is_job(record) then
        if places[at] == snoozed then
          record = due_at(record, redis.call('ZSCORE', snoozed, id))
        end
        listed[#listed + 1], listed[#listed + 2] = id, record
        bytes = bytes + #record
        if bytes >= 1048576 then
          break
        end
      elseif not record and cut == 1 then
        stale[#stale + 1] = id
      end
    end
    if #stale > 0 then
      -- Remove an id without a record: it is no job.
      removed = redis.call('ZREM', places[at], unpack(stale))
    end
    skip, looked = skip + #found - removed, looked + #found
    if #found < room then
      local all = redis.call('ZCARD', places[at]) + (has_runs and 16 * redis.call('ZCARD', runs) or 0)
      skip, at = math.max(skip - all, 0), at + 1
    end
  end
  return listed
end

if verb == 'pause' then
  is_paused = ARGV[first] + 0
  wake_for(now)
  return 1
end

if verb == 'release_unique' then
  local holder = redis.call('HGET', unique, ARGV[first])
  local ends_at = holder and struct.unpack('>I6', holder) or 0
  local is_held = ends_at > now or (holder and ends_at == 0 and redis.call('HEXISTS', jobs, holder:sub(7)) == 1)
  redis.call('HDEL', unique, ARGV[first])
  return is_held and 1 or 0
end

if verb == 'purge' then
  local count, removed, bytes = math.min(ARGV[first] + 0, 256), 0, 0
  local has_unique = redis.call('EXISTS', unique) == 1
  for place = 0, 3 do
    local set = due[place] or snoozed
    local begun = place == 1 and removed < count and math.ceil((count - removed) / 16) or 0
    for _, run in ipairs(begun > 0 and redis.call('ZRANGE', runs, 0, begun - 1) or {}) do
      break_up(run)
    end
    local found = removed < count and redis.call('ZRANGE', set, 0, count - removed - 1) or {}
    for i = 1, has_unique and #found or 0 do
      if bytes >= 1048576 then
        -- The next call continues here.
        count, found = 0, {unpack(found, 1, i - 1)}
        break
      end
      local record = redis.call('HGET', jobs, found[i])
      if record then
        bytes = bytes + #record
        free(record, found[i], ARGV[first + 1])
      end
    end
    if #found > 0 then
      redis.call('ZREMRANGEBYRANK', set, 0, #found - 1)
      redis.call('HDEL', jobs, unpack(found))
      removed = removed + #found
    end
  end
  return removed
end

local answers, bytes = {}, 0
-- `forget` reads records only if unique keys are held.
local is_read = verb == 'replay' or redis.call('EXISTS', unique) == 1
for i = 1, math.min(#ARGV - first + 1, 256) do
  local id = ARGV[first + i - 1]
  local is_dead = redis.call('ZSCORE', dead, id)
  local record = is_dead and is_read and redis.call('HGET', jobs, id)
  answers[i] = 0
  if is_dead and verb == 'forget' then
    if record then
      free(record, id)
    end
    redis.call('HDEL', jobs, id)
    answers[i] = redis.call('ZREM', dead, id)
  elseif record and is_job(record) and hold(record, id) then
    answers[i] = redis.call('ZREM', dead, id)
    local flags, max, _, _, error_len, key_len, headers = struct.unpack('>BHHBHBI4', record, 14)
    local head = struct.pack('>I6BHHBHBI4', now, flags, max, 0, 0, 0, key_len, headers)
    local rest = record:sub(27, 26 + key_len) .. record:sub(27 + key_len + error_len)
    redis.call('HSET', jobs, id, record:sub(1, 7) .. head .. rest)
    redis.call('ZADD', due[flags % 4], now, id)
    keep(due[flags % 4], keep_ms)
    keep(jobs, keep_ms + 86400000)
  end
  bytes = bytes + (record and #record or 0)
  if bytes >= 1048576 then
    -- The next call continues here.
    break
  end
end
if verb == 'replay' then
  wake_for(now)
end
return answers
