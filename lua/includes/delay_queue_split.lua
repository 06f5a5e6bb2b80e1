-- delay_queue_split: split a run of jobs.

-- The jobs of the run wait as single jobs then.
local function break_up(run)
  local score, members, found = redis.call('ZSCORE', runs, run), {}, jobs_of(run)
  for i = 1, #found do
    members[2 * i - 1], members[2 * i] = score, found[i]
  end
  redis.call('ZREM', runs, run)
  redis.call('ZADD', normal, unpack(members))
  local lasts = math.max(score - now, 0) + keep_ms
  keep(normal, lasts)
  keep(jobs, lasts + 86400000)
end
