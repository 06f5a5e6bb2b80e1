-- delay_queue_cancel: remove a waiting job, or notify the worker of a running one.
--
-- Includes delay_queue_time, delay_queue_keys, delay_queue_record, delay_queue_runs, delay_queue_split, delay_queue_find
-- Includes delay_queue_unique, delay_queue_free
-- ARGV[4]  id  of the job
-- ARGV[5]  keeps_unique  1 to keep a timed unique key, or 0
--
-- Returns  0 no such job, 1 done, 2 running: its worker is notified, 3 dead
-- Errors   TOLLGATE also if these scripts did not write the running job
-- Repeat   harmless: a removed job stays removed
local id, keeps_unique = ARGV[4], ARGV[5]

local is, record, place, run = find(id)
if run then
  break_up(run)
end
if is == 1 then
  redis.call('ZREM', place, id)
  redis.call('HDEL', jobs, id)
  free(record, id, keeps_unique)
elseif is == 2 and not is_job(record) then
  -- The job may have no lease, and then nothing would end the cancelled run.
  return redis.error_reply('TOLLGATE the value does not hold a job of version 1')
elseif is == 2 and redis.call('HDEL', jobs, id) == 1 then
  redis.call('HSET', cancels, '\0' .. id, record)
  local key = free(record, id, keeps_unique)
  if key then
    redis.call('HSET', cancels, '\1' .. key, id)
  end
  keep(cancels, keep_ms)
end
return is
