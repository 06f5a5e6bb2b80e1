-- delay_queue_take: take due jobs of one priority.

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
  -- Merges both sets, up to `most` jobs. Returns their ids, the rest of a run, and the next position in either set.
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
