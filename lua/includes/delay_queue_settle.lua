-- delay_queue_settle: end the attempt of a job that is not done.

-- Pending writes, as arguments of commands: records, due times by priority, snoozed and dead jobs; and pending removals.
local records, waiting, asleep, died, gone = {}, {[0] = {}, {}, {}}, {}, {}, {}
local latest = now

-- Ends an attempt of a job that is not done; kind 5 is an expired lease. Returns the digit of `finished`.
local function settle(id, record, kind, delay, failure)
  if not is_job(record) then
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
    release_key(key, id)
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
