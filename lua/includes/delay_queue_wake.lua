-- delay_queue_wake: wake a waiting worker.

-- Wakes the timekeeper if it would look after `score`, or an idle worker if there is none. Returns the timekeeper, when it looks again,
-- and whether a worker was notified.
local function wake_worker(publish, wake, idle, keeper, wakes_at, score)
  local has_keeper = keeper ~= '' and wakes_at + 1000 >= now
  if has_keeper and score >= wakes_at then
    return keeper, wakes_at, false
  end
  local notified = has_keeper and notify(publish, wake .. keeper, '1') or 0
  for _ = 1, 4 do
    local next = notified == 0 and redis.call('ZPOPMIN', idle)[1]
    if not next then
      break
    end
    keeper, notified = next, notify(publish, wake .. next, '1')
  end
  return keeper, notified > 0 and now or wakes_at, notified > 0
end
