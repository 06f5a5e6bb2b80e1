-- delay_queue_replace: replace the payload of a waiting job.
--
-- Includes delay_queue_time, delay_queue_keys, delay_queue_record, delay_queue_runs, delay_queue_find
-- ARGV[4]  id  of the job
-- ARGV[5]  payload  the new one
--
-- Returns  0 no such job, 1 done, 2 running, 3 dead
-- Repeat   harmless
local id, payload = ARGV[4], ARGV[5]

local is, record = find(id)
if is == 1 then
  local error_len, key_len, headers = struct.unpack('>HBI4', record, 20)
  redis.call('HSET', jobs, id, record:sub(1, 26 + key_len + error_len + headers) .. payload)
end
return is
