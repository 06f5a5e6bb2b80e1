-- delay_queue_purge: remove waiting jobs.
--
-- Includes delay_queue_time, delay_queue_keys, delay_queue_record, delay_queue_runs, delay_queue_split, delay_queue_unique
-- Includes delay_queue_free
-- ARGV[4]  count  how many, at most 256
-- ARGV[5]  keeps_unique  1 to keep timed unique keys, or 0
--
-- Returns  how many were removed
-- Repeat   harmless: it removes further jobs
local count, keeps_unique = math.min(ARGV[4] + 0, 256), ARGV[5]

local removed, bytes = 0, 0
local has_unique = redis.call('EXISTS', unique) == 1
for place = 0, 3 do
  local set = due[place] or snoozed
  local begun = place == 1 and removed < count and math.ceil((count - removed) / 16) or 0
  for _, run in ipairs(begun > 0 and redis.call('ZRANGE', runs, 0, begun - 1) or {}) do
    break_up(run)
  end
  local found = removed < count and redis.call('ZRANGE', set, 0, count - removed - 1) or {}
  for i = 1, has_unique and #found or 0 do
    if bytes >= 1048576 then
      -- The next call continues here.
      count, found = 0, {unpack(found, 1, i - 1)}
      break
    end
    local record = redis.call('HGET', jobs, found[i])
    if record then
      bytes = bytes + #record
      free(record, found[i], keeps_unique)
    end
  end
  if #found > 0 then
    redis.call('ZREMRANGEBYRANK', set, 0, #found - 1)
    redis.call('HDEL', jobs, unpack(found))
    removed = removed + #found
  end
end
return removed
