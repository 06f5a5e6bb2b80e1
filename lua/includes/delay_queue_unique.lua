-- delay_queue_unique: hold and release unique keys.

-- The job that holds a unique key, and when the hold ends in ms, 0 while the job exists. A hold whose time has ended is none.
local function holder_of(key)
  local holder = redis.call('HGET', unique, key)
  local ends_at = holder and struct.unpack('>I6', holder)
  if holder and (ends_at == 0 or ends_at > now) then
    return holder:sub(7), ends_at
  end
end

-- Releases a unique key if the job holds it. A timed hold stays unless `ends_time`. Returns when the released hold would have ended.
local function release_key(key, id, ends_time)
  local holder = redis.call('HGET', unique, key)
  if holder and holder:sub(7) == id and (ends_time or holder:sub(1, 6) == '\0\0\0\0\0\0') then
    redis.call('HDEL', unique, key)
    return (struct.unpack('>I6', holder))
  end
end
