-- delay_queue_forget: remove dead jobs.
--
-- Includes delay_queue_time, delay_queue_keys, delay_queue_record, delay_queue_unique, delay_queue_free
-- ARGV[4]  first  the first of at most 256 ids
--
-- Returns  1 or 0 for each id. After 1 MiB of records the other ids have no answer
-- Repeat   harmless
local first = 4

local answers, bytes = {}, 0
-- Records are read only if unique keys are held.
local has_unique = redis.call('EXISTS', unique) == 1
for i = 1, math.min(#ARGV - first + 1, 256) do
  local id = ARGV[first + i - 1]
  local is_dead = redis.call('ZSCORE', dead, id)
  local record = is_dead and has_unique and redis.call('HGET', jobs, id)
  answers[i] = 0
  if is_dead then
    if record then
      free(record, id)
      bytes = bytes + #record
    end
    redis.call('HDEL', jobs, id)
    answers[i] = redis.call('ZREM', dead, id)
  end
  if bytes >= 1048576 then
    -- The next call continues here.
    break
  end
end
return answers
