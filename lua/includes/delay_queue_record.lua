-- delay_queue_record: the record of a job.

-- Whether a record is a job of version 1.
local function is_job(record)
  return #record > 25 and record:byte(1) == 1 and record:byte(14) % 4 < 3
end

-- The unique key.
local function key_of(record)
  return is_job(record) and record:byte(14) > 3 and record:sub(27, 26 + record:byte(22))
end

-- A record with another due time.
local function due_at(record, score)
  return record:sub(1, 7) .. struct.pack('>I6', score) .. record:sub(14)
end
