-- delay_queue_counts: count the jobs of a queue.
--
-- Includes delay_queue_time, delay_queue_keys
--
-- Returns  {waiting, due, running, dead, oldest_ms (-1 if none is due), is_paused}
-- Repeat   harmless
local waiting, ready, oldest, sets = 0, 0, -1, {high, normal, low, snoozed, runs}
for i = 1, 5 do
  local each = i == 5 and 16 or 1
  waiting = waiting + each * redis.call('ZCARD', sets[i])
  ready = ready + each * redis.call('ZCOUNT', sets[i], '-inf', now)
  local head = redis.call('ZRANGE', sets[i], 0, 0, 'WITHSCORES')[2]
  oldest = head and math.max(oldest, now - head) or oldest
end
return {waiting, ready, redis.call('ZCARD', leases), redis.call('ZCARD', dead), oldest, is_paused}
