-- delay_queue_wake: wake a waiting worker.

-- Number of notified workers. Without the right to publish, workers poll.
local function tell(publish, channel)
  local told = redis.pcall(publish, channel, '1')
  if publish == 'SPUBLISH' and type(told) ~= 'number' then
    -- Redis 6.2 lacks SPUBLISH, and its PUBLISH counts only this node.
    told = type(redis.pcall('PUBLISH', channel, '1')) == 'number' and 1
  end
  return type(told) == 'number' and told or 0
end

-- Wakes the timekeeper if it would look after `score`, or an idle worker if there is none. Returns the timekeeper, when it looks again,
-- and whether a worker was notified.
local function wake_worker(publish, wake, idle, keeper, wakes_at, score)
  local has_keeper = keeper ~= '' and wakes_at + 1000 >= now
  if has_keeper and score >= wakes_at then
    return keeper, wakes_at, false
  end
  local told = has_keeper and tell(publish, wake .. keeper) or 0
  for _ = 1, 4 do
    local next = told == 0 and redis.call('ZPOPMIN', idle)[1]
    if not next then
      break
    end
    keeper, told = next, tell(publish, wake .. next)
  end
  return keeper, told > 0 and now or wakes_at, told > 0
end
