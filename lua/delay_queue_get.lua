-- delay_queue_get: look up a job.
--
-- Includes delay_queue_time, delay_queue_keys, delay_queue_record, delay_queue_runs, delay_queue_find
-- ARGV[4]  id  of the job
--
-- Returns  {} or {state, record}: 1 waiting, 2 running, 3 dead; a snoozed job is due when it returns, as in delay_queue_list
-- Repeat   harmless
local id = ARGV[4]

local is, record, place = find(id)
if place == snoozed then
  record = due_at(record, redis.call('ZSCORE', snoozed, id))
end
return is > 0 and {is, record} or {}
