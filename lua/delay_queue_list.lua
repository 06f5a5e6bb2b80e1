-- delay_queue_list: list the waiting, running or dead jobs of a queue.
--
-- Includes delay_queue_time, delay_queue_keys, delay_queue_record, delay_queue_runs
-- ARGV[4]  where  1 waiting, 2 running or 3 dead
-- ARGV[5]  skip  how many to skip
-- ARGV[6]  count  how many to list, at most 256
--
-- Returns  {id, record, ...}: at most 1 MiB of records, plus one. A snoozed job is due when it returns
-- Repeat   harmless
local where, skip, count = ARGV[4] + 0, ARGV[5] + 0, math.min(ARGV[6] + 0, 256)

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

local sets = ({{[0] = high, normal, low, snoozed}, {[0] = leases}, {[0] = dead}})[where]
local has_cancels = sets[0] == leases and redis.call('EXISTS', cancels) == 1
-- Members of `leases` begin with a token.
local cut = where == 2 and 8 or 1
local listed, bytes, at, looked = {}, 0, 0, 0
while sets[at] and #listed < 2 * count and bytes < 1048576 and looked < 1024 do
  local room = math.min(count - #listed / 2, 64)
  local has_runs = sets[at] == normal and redis.call('EXISTS', runs) == 1
  local found = has_runs and waiting_from(skip, room) or redis.call('ZRANGE', sets[at], skip, skip + room - 1)
  local stale, removed = {}, 0
  for i = 1, #found do
    local id = found[i]:sub(cut)
    local record = has_cancels and redis.call('HGET', cancels, '\0' .. id) or redis.call('HGET', jobs, id)
    if record and is_job(record) then
      if sets[at] == snoozed then
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
    removed = redis.call('ZREM', sets[at], unpack(stale))
  end
  skip, looked = skip + #found - removed, looked + #found
  if #found < room then
    local all = redis.call('ZCARD', sets[at]) + (has_runs and 16 * redis.call('ZCARD', runs) or 0)
    skip, at = math.max(skip - all, 0), at + 1
  end
end
return listed
