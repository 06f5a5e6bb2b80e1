-- delay_queue_find: where a job is.

-- 0 no such job, 1 waiting, 2 running, 3 dead. Also returns its record and, for a waiting job, its set and its run.
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
