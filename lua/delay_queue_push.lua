-- delay_queue_push: add jobs of one priority, unless they exist.
--
-- Includes server_notify, delay_queue_time, delay_queue_wake
-- KEYS[1]  jobs    expires `keep_ms` after the last job is due. For all keys but `ends`, see delay_queue_keys
-- KEYS[2]  due     of the priority, expires likewise
-- KEYS[3]  dead
-- KEYS[4]  unique  expires likewise
-- KEYS[5]  ends    sorted set of timed unique keys by when they end  prefix:2:{delay_queue:<name>}:unique_ends
-- KEYS[6]  state
-- KEYS[7]  idle
-- KEYS[8]  runs    expires likewise
-- ARGV[1]  keep_ms  how long keys outlive their last entry, at most 2^40
-- ARGV[2]  max_jobs  how many jobs there may be
-- ARGV[3]  publish  PUBLISH, or SPUBLISH on a cluster
-- ARGV[4]  wake  prefix of the channels of workers
-- ARGV[5]  count  how many jobs, at most 256
-- ARGV[6]  first  id and record of each job, without the times of the record. Then for each group of jobs with one due time: the number
--   of jobs, negative if they are runs, and `when`: a delay in ms, or a negated instant in ms since 1970. Then for each unique job: its
--   position from 1, 6 bytes duration in ms (0 while the job exists), and the key
--
-- Value    see delay_queue_keys
-- Returns  {answers, holders ...}: a digit for each job (0 the id exists, 1 new, 2 queue full, 3 another job holds its unique key), and for
--         each
--   3 the id of the holder
-- Errors   WRONGTYPE
-- Repeat   harmless: waiting and running jobs stay as they are, done jobs are pushed again
local jobs, due, dead, unique, ends = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local state, idle, runs = KEYS[6], KEYS[7], KEYS[8]
local keep_ms, max_jobs, publish, wake = ARGV[1] + 0, ARGV[2] + 0, ARGV[3], ARGV[4]
local count, first = math.min(ARGV[5] + 0, 256), 6
local call, unpack = redis.call, unpack

local ids, records, dues, taken, singles, whole = {}, {}, {}, {}, {}, {}
local soonest, latest, has_twins, is_run = nil, now, false, false
local at, last, left, alone, head, score = first + 2 * count, 0, 0, 0, '', '0'
for i = 1, count do
  if left == 0 then
    local when = ARGV[at + 1] + 0
    local due_ms = when > 0 and later + when or math.max(now, -when)
    left, at = ARGV[at] + 0, at + 2
    is_run, left = left < 0, math.abs(left)
    soonest, latest = math.min(soonest or due_ms, due_ms), math.max(latest, due_ms)
    head, score = struct.pack('>BI6I6', 1, now, due_ms), string.format('%d', due_ms)
  end
  local id = ARGV[first + last]
  has_twins = has_twins or taken[id]
  ids[i], dues[i], taken[id] = id, score, true
  records[last + 1], records[last + 2] = id, head .. ARGV[first + last + 1]
  if not is_run then
    singles[alone + 1], singles[alone + 2], alone = score, id, alone + 2
  elseif left % 16 == 0 then
    whole[#whole + 1], whole[#whole + 2] = score, id
  end
  last, left = last + 2, left - 1
end

local there = call('HMGET', jobs, unpack(ids))
local known = call('HLEN', jobs)
local room = max_jobs - known
local reply = {string.rep('1', count)}
local is_plain = count <= room and at > #ARGV and not has_twins
for i = 1, count do
  is_plain = is_plain and not there[i]
end
if not is_plain then
  local answers, kept, keys = {}, {}, {}
  for i = at, math.min(#ARGV, at + 2 * count) - 1, 2 do
    keys[ARGV[i] + 0] = ARGV[i + 1]
  end
  soonest, latest, taken, whole, singles = nil, now, {}, {}, {}
  for i = 1, count do
    local id, key, due_ms = ids[i], keys[i], dues[i] + 0
    local was_dead = there[i] and not taken[id] and call('ZSCORE', dead, id)
    local answer = '1'
    if taken[id] or (there[i] and not was_dead) then
      answer = '0'
    elseif not was_dead and room < 1 then
      answer = '2'
    elseif key then
      local holder = call('HGET', unique, key:sub(7))
      local ends_at = holder and struct.unpack('>I6', holder) or 0
      local its = holder and holder:sub(7)
      -- A holder whose job was evicted blocks no other job.
      if ends_at > now or (holder and ends_at == 0 and (taken[its] or call('HEXISTS', jobs, its) == 1)) then
        answer, reply[#reply + 1] = '3', its
      else
        local span = struct.unpack('>I6', key)
        ends_at = span > 0 and later + span or 0
        call('HSET', unique, key:sub(7), struct.pack('>I6', ends_at) .. id)
        if span > 0 then
          call('ZADD', ends, ends_at, key:sub(7))
          keep(ends, span + keep_ms)
          keep(unique, span + keep_ms)
        end
        keep(unique, due_ms - now + keep_ms)
      end
    end
    if answer == '1' then
      taken[id] = true
      if was_dead then
        call('ZREM', dead, id)
      else
        room = room - 1
      end
      kept[#kept + 1], kept[#kept + 2] = id, records[2 * i]
      singles[#singles + 1], singles[#singles + 2] = dues[i], id
      soonest, latest = math.min(soonest or due_ms, due_ms), math.max(latest, due_ms)
    end
    answers[i] = answer
  end
  reply[1], records = table.concat(answers), kept
end
if not soonest then
  return reply
end
call('HSET', jobs, unpack(records))
local lasts = latest - now + keep_ms
if known == 0 then
  keep(jobs, lasts + 86400000)
end
for key, members in pairs({[due] = singles, [runs] = whole}) do
  if #members > 0 then
    call('ZADD', key, unpack(members))
    if call('PTTL', key) < lasts then
      call('PEXPIRE', key, lasts + 86400000)
      keep(jobs, lasts + 86400000)
    end
  end
end
-- Each push removes some expired unique keys.
if call('EXISTS', ends) == 1 then
  local over = call('ZRANGEBYSCORE', ends, '-inf', now, 'LIMIT', 0, 2 * count)
  for i = 1, #over do
    local holder = call('HGET', unique, over[i])
    local ends_at = holder and struct.unpack('>I6', holder) or 0
    if ends_at > 0 and ends_at <= now then
      call('HDEL', unique, over[i])
    end
    call('ZREM', ends, over[i])
  end
end

local stored = call('GET', state)
if stored and #stored > 14 and stored:byte(1) == 1 then
  local is_paused, token, wakes_at = struct.unpack('<BI7I6', stored, 2)
  if is_paused == 1 then
    -- A pause lasts as long as its jobs.
    keep(state, lasts)
  else
    local keeper, looks_at, is_awake = wake_worker(publish, wake, idle, stored:sub(16), wakes_at, soonest)
    if is_awake then
      call('SET', state, struct.pack('<BBI7I6', 1, is_paused, token, looks_at) .. keeper, 'PX', 600000)
    end
  end
end
return reply
