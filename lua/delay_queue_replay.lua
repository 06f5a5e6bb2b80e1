-- delay_queue_replay: make dead jobs due again.
--
-- Includes server_notify, delay_queue_time, delay_queue_keys, delay_queue_record, delay_queue_unique, delay_queue_wake
-- Includes delay_queue_state
-- ARGV[4]  first  the first of at most 256 ids
--
-- Returns  1 or 0 for each id. A job whose unique key another job holds is not replayed. After 1 MiB of records the other ids have no answer
-- Repeat   harmless
local first = 4

-- Takes the unique key of a job again, unless another job holds it. Returns whether the job may wait again.
local function hold(record, id)
  if math.floor(record:byte(14) / 4) % 4 ~= 1 then
    return true
  end
  local key = record:sub(27, 26 + record:byte(22))
  local holder, ends_at = holder_of(key)
  -- A holder whose job was evicted blocks no other job.
  if holder and (ends_at > 0 or (holder ~= id and redis.call('HEXISTS', jobs, holder) == 1)) then
    return false
  end
  redis.call('HSET', unique, key, '\0\0\0\0\0\0' .. id)
  keep(unique, keep_ms)
  return true
end

local answers, bytes = {}, 0
for i = 1, math.min(#ARGV - first + 1, 256) do
  local id = ARGV[first + i - 1]
  local record = redis.call('ZSCORE', dead, id) and redis.call('HGET', jobs, id)
  answers[i] = 0
  if record and is_job(record) and hold(record, id) then
    answers[i] = redis.call('ZREM', dead, id)
    local flags, max, _, _, error_len, key_len, headers = struct.unpack('>BHHBHBI4', record, 14)
    local head = struct.pack('>I6BHHBHBI4', now, flags, max, 0, 0, 0, key_len, headers)
    local rest = record:sub(27, 26 + key_len) .. record:sub(27 + key_len + error_len)
    redis.call('HSET', jobs, id, record:sub(1, 7) .. head .. rest)
    redis.call('ZADD', due[flags % 4], now, id)
    keep(due[flags % 4], keep_ms)
    keep(jobs, keep_ms + 86400000)
  end
  bytes = bytes + (record and #record or 0)
  if bytes >= 1048576 then
    -- The next call continues here.
    break
  end
end
wake_for(now)
return answers
