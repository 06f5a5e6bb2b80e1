-- cache_filter_header: the header of a version of an exists filter.
--
-- Value    bits: 4 bytes TGEF, 1 byte format 1, 1 byte B while it is built or R when it is active, 2 bytes 0, 4 bytes number of blocks,
--          16 bytes seed, 7 bytes number of keys that set a bit, 7 bytes number of set bits, 7 bytes time of becoming active in ms of the
--          server's clock, zeros up to 64 bytes, blocks of 32 bytes. Numbers have their lowest byte first
--          versions: 1 byte format 1, 16 bytes id of the active version, 16 bytes id of the unfinished version. Zeros for none.
--          Without versions it is missing, or 1 byte format 1, 7 bytes time in ms at which an addition found it missing

-- Returns the number of blocks of a version, and then the numbers of keys and set bits. Returns nothing if it is missing or damaged.
local function read_header(bits)
  -- An error for a value of another type.
  local header = redis.pcall('GETRANGE', bits, 0, 63)
  if type(header) ~= 'string' or #header < 64 or header:sub(1, 5) ~= 'TGEF\1' then
    return
  end
  local blocks = struct.unpack('<I4', header, 9)
  if redis.call('STRLEN', bits) ~= 64 + 32 * blocks then
    return
  end
  return blocks, struct.unpack('<I7I7', header, 29)
end

-- Returns the ids of the versions, empty for none. Without them, the time in ms at which an addition found none may follow.
local function read_ids(versions)
  local found = redis.call('GET', versions) or ''
  if #found == 8 and found:byte() == 1 then
    return '', struct.unpack('<I7', found, 2)
  end
  return found
end
