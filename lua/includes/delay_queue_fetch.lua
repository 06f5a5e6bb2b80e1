-- delay_queue_fetch: read records, a bounded number of bytes in all.

-- About how many bytes of records a script reads. The last read may exceed it.
local enough = 1048576

local read, bytes = 0, 0

-- Reads records up to the byte limit, and returns them and their number. Starts with one record, and estimates how many of the next ones
-- fit. Reads at most four times as many as so far, since small records may precede large ones.
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
