-- delay_queue_fetch: read records, a bounded number of bytes in all.

-- Bytes of records to read at a time, plus one record.
local enough = 1048576

local read, bytes = 0, 0

-- Reads records up to the byte limit, and returns them and their number. Starts with one record and estimates the size of the next ones;
-- a few small records are no basis for that.
local function fetch(ids)
  local found, count = {}, 0
  while count < #ids and bytes < enough do
    local size = math.min(4 * read, math.floor((enough - bytes) * read / math.max(bytes, 1)), #ids - count)
    local part = redis.call('HMGET', jobs, unpack(ids, count + 1, count + math.max(size, 1)))
    for i = 1, #part do
      found[count + i] = part[i]
      bytes = bytes + (part[i] and #part[i] or 0)
    end
    count, read = count + #part, read + #part
  end
  return found, count
end
