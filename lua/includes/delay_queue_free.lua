-- delay_queue_free: release the unique key of a job that is removed.

-- Releases the unique key of a job. A timed key stays if `keeps` is '1', or if it outlives a cancellation. Returns the key if the job
-- held it. A hold whose time has ended is none.
local function free(record, id, keeps)
  local key = key_of(record)
  local holder = key and redis.call('HGET', unique, key)
  local is_kept = keeps == '1' or (key and record:byte(14) > 15)
  if holder and holder:sub(7) == id and (not is_kept or holder:sub(1, 6) == '\0\0\0\0\0\0') then
    redis.call('HDEL', unique, key)
    local ends_at = struct.unpack('>I6', holder)
    return (ends_at == 0 or ends_at > now) and key
  end
end
