-- delay_queue_free: release the unique key of a job that is removed.

-- A timed key stays if `keeps` is '1', or if it outlives a cancellation. Returns the released key, unless the time of the hold had ended.
local function free(record, id, keeps)
  local key = key_of(record)
  local ends_at = key and release_key(key, id, keeps ~= '1' and record:byte(14) < 16)
  return ends_at and (ends_at == 0 or ends_at > now) and key
end
