-- delay_queue_finish: acknowledge claimed jobs.
--
-- ARGV[9]  done      number of jobs done or cancelled by their worker, at most 256 with the others
-- ARGV[10]  others   number of jobs acknowledged otherwise
-- ARGV[11]  first    the tickets of done jobs; then ticket, kind, delay and error of each other job. Kinds: 1 retry after `delay` ms,
--                    2 snooze for `delay` ms, 3 release, 4 dead for the reason `delay`. Then the number of done jobs that are unique,
--                    and for each its position from 1, negative to release a timed unique key, and the key
local done, first = math.min(ARGV[9] + 0, 256), 11
local others = math.min(ARGV[10] + 0, 256 - done)
-- A local, because it is called for each job.
local cut = string.sub

-- A digit for each acknowledged job, see the reply.
local finished = ''
local tickets, ids, cancelled = {unpack(ARGV, first, first + done - 1)}, {}, {}
for i = 1, others do
  tickets[done + i] = ARGV[first + done + 4 * (i - 1)]
end
for i = 1, done + others do
  ids[i] = cut(tickets[i], 8)
end
if #tickets > 0 then
  local ends = redis.call('ZMSCORE', leases, unpack(tickets))
  local there = others > 0 and redis.call('HMGET', jobs, unpack(ids, done + 1))
  local removed = redis.call('ZREM', leases, unpack(tickets))
  if others == 0 and removed == done and not has_cancels then
    -- The common case: all jobs are done, each lease was held, and none is repeated.
    gone, finished = ids, string.rep('1', done)
    write()
  else
    local answers, seen = {}, {}
    for i = 1, done + others do
      if ends[i] and not seen[tickets[i]] then
        seen[tickets[i]], answers[i] = true, '1'
        cancelled[i] = end_cancelled(ids[i])
        if cancelled[i] then
          answers[i] = i <= done and '1' or '4'
        elseif i <= done then
          gone[#gone + 1] = ids[i]
        elseif not there[i - done] then
          answers[i] = '0'
        else
          local at = first + done + 4 * (i - done - 1)
          answers[i] = settle(ids[i], there[i - done], ARGV[at + 1] + 0, ARGV[at + 2] + 0, ARGV[at + 3])
        end
      end
    end
    write()
    local looked_at = 0
    for i = 1, done + others do
      if not answers[i] then
        local record = i <= done and looked_at < enough and redis.call('HGET', jobs, ids[i]) or ''
        looked_at = looked_at + #record
        -- A job that was pushed after the ticket was issued is another job.
        local is_other = #record > 25 and struct.unpack('>I6', record, 2) * 1000 > struct.unpack('>I7', tickets[i])
        answers[i] = not is_other and redis.call('HEXISTS', jobs, ids[i]) == 1 and '3' or '0'
      end
    end
    finished = table.concat(answers)
  end
  local at = first + done + 4 * others
  for i = 1, math.min(ARGV[at] + 0, done) do
    local ends_time = ARGV[at + 2 * i - 1] + 0 < 0
    local place = math.abs(ARGV[at + 2 * i - 1])
    if finished:sub(place, place) == '1' and not cancelled[place] then
      release_key(ARGV[at + 2 * i], ids[place], ends_time)
    end
  end
end
