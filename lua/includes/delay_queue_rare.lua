-- delay_queue_rare: what most queues lack: other priorities than normal, dead, snoozed or cancelled jobs, unique keys, several idle
-- workers.

-- These keys are usually missing, which one command finds out.
local has_rare = redis.call('EXISTS', high, low, dead, unique, cancels, snoozed, idle) > 0
local has_unique = has_rare and redis.call('EXISTS', unique) == 1
local has_cancels = has_rare and redis.call('EXISTS', cancels) == 1
if has_cancels and redis.call('EXISTS', leases) == 0 and redis.call('HLEN', cancels) > 0 then
  -- If a full server evicted the leases, no cancelled run would ever end. HLEN fails on a foreign key, which is then not removed.
  redis.call('UNLINK', cancels)
  has_cancels = false
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
    local holder = holder_of(key)
    if holder then
      resume(holder)
    end
  end
  return true
end
