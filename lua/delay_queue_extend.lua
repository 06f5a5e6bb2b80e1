-- delay_queue_extend: renew the leases of tickets that are still in `leases`.
--
-- Includes delay_queue_time
-- KEYS[1]  leases    sorted set of tickets, see delay_queue_keys      prefix:2:{delay_queue:<name>}:leases
-- KEYS[2]  jobs      hash of records, see delay_queue_keys             prefix:2:{delay_queue:<name>}:jobs
-- KEYS[3]  cancels   hash, see delay_queue_keys                       prefix:2:{delay_queue:<name>}:cancels
-- ARGV[1]  keep_ms   how long keys outlive their last entry
-- ARGV[2]  lease_ms  from now on, 10 to 86400000
-- ARGV[3]  first     the first of at most 256 tickets
--
-- Value    leases, jobs, cancels: see delay_queue_keys
-- Returns  a number for each ticket. Lease lost or job ended: 0. Renewed, even if the job's record was evicted: 1. Renewed, and the job
--          was cancelled: 2
-- Errors   WRONGTYPE
-- Repeat   harmless
local leases, jobs, cancels, keep_ms, lease_ms, first = KEYS[1], KEYS[2], KEYS[3], ARGV[1] + 0, ARGV[2] + 0, 3

local ends = string.format('%d', later + lease_ms)

local tickets, ids = {}, {}
for i = 1, math.min(#ARGV - first + 1, 256) do
  tickets[i] = ARGV[first + i - 1]
  ids[i] = tickets[i]:sub(8)
end
local held = redis.call('ZMSCORE', leases, unpack(tickets))
local has_cancels = redis.call('EXISTS', cancels) == 1
local answers, extended = {}, {}
for i = 1, #tickets do
  answers[i] = 0
  if held[i] then
    answers[i] = has_cancels and redis.call('HEXISTS', cancels, '\0' .. ids[i]) == 1 and 2 or 1
    extended[#extended + 1] = ends
    extended[#extended + 1] = tickets[i]
  end
end
if #extended > 0 then
  -- On a full server the first write of a script must need no memory.
  redis.call('PEXPIRE', leases, math.max(redis.call('PTTL', leases), lease_ms + keep_ms))
  redis.call('ZADD', leases, unpack(extended))
  keep(leases, lease_ms + keep_ms)
  keep(jobs, lease_ms + keep_ms + 86400000)
end
return answers
