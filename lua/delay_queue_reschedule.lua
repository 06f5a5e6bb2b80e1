-- delay_queue_reschedule: change the due time of a waiting job.
--
-- Includes server_notify, delay_queue_time, delay_queue_keys, delay_queue_record, delay_queue_runs, delay_queue_split
-- Includes delay_queue_find, delay_queue_wake, delay_queue_state
-- ARGV[4]  id  of the job
-- ARGV[5]  when  a delay in ms, or a negated instant in ms since 1970
--
-- Returns  0 no such job, 1 done, 2 running, 3 dead
-- Repeat   harmless: a delay counts from the last call
local id, when = ARGV[4], ARGV[5] + 0

local is, record, place, run = find(id)
if run then
  break_up(run)
end
if is == 1 then
  local score = when > 0 and later + when or math.max(now, -when)
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
