-- delay_queue_state: write the state of a queue.

-- Wakes a worker for a job that is due at `score`, and writes the state.
local function wake_for(score)
  if is_paused == 0 then
    keeper, wakes_at = wake_worker(publish, wake, idle, keeper, wakes_at, score)
  end
  -- A pause lasts as long as its jobs.
  local lasts = is_paused == 0 and 600000 or math.max(redis.call('PTTL', jobs), redis.call('PTTL', state), keep_ms)
  -- On a full server the first write of a script must need no memory.
  redis.call('PEXPIRE', state, lasts)
  redis.call('SET', state, struct.pack('<BBI7I6', 1, is_paused, token, wakes_at) .. keeper, 'PX', lasts)
end
