-- cache_filter_add: set the bits of keys in the active version of an exists filter, and in the unfinished version.
--
-- Includes cache_filter_header
-- KEYS[1]  versions     string                            prefix:2:{cache_filter:<filter>}:versions
-- KEYS[2]  active       the active version                prefix:2:{cache_filter:<filter>}:bits:<version>
-- KEYS[3]  building     the unfinished version. Each of the two is versions again if there is none
-- ARGV[1]  seen         value of versions that the caller has seen
-- ARGV[2]  in_active    for each key: 4 bytes number of its block, 32 bytes block with only its bits. At most 128 keys
-- ARGV[3]  in_building  likewise
-- ARGV[4]  ttl_ms       how long the active version is kept from now on
-- ARGV[5]  build_ms     how long the unfinished version is kept from now on, 0 to leave its expiry
-- ARGV[6]  keep_ms      how long versions is kept from now on, longer than each version
--
-- Returns  {1, active, building}: the bits are set in the versions with 1, and those with 0 are not intact | {0, 0, 0}: versions has
--          another value
--          | {2, missing_ms, 0}: there are no versions, and for this long additions have found none
-- Errors   TOLLGATE for more than 128 keys; WRONGTYPE
-- Repeat   sets the same bits again
local versions, active, building, seen, in_active, in_building = KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2], ARGV[3]
local ttl_ms, build_ms, keep_ms = ARGV[4], ARGV[5], ARGV[6]
local entry, most, words = 36, 128, '<i4i4i4i4i4i4i4i4'

-- Sets the bits of a key in its block, and returns how many were not set.
local function set(bits, from, keys, at)
  local found = {struct.unpack(words, redis.call('GETRANGE', bits, from, from + 31))}
  local wanted = {struct.unpack(words, keys, at)}
  local new = 0
  for word = 1, 8 do
    -- Each key has one bit in each word.
    local merged = bit.bor(found[word], wanted[word])
    if merged ~= found[word] then
      found[word] = merged
      new = new + 1
    end
  end
  if new > 0 then
    redis.call('SETRANGE', bits, from, struct.pack(words, unpack(found, 1, 8)))
  end
  return new
end

local function add(bits, keys)
  local blocks, changed, set_bits = read_header(bits)
  if not blocks then
    return 0
  end
  for at = 1, #keys, entry do
    local block = struct.unpack('<I4', keys, at)
    if block < blocks then
      local new = set(bits, 64 + 32 * block, keys, at + 4)
      if new > 0 then
        changed, set_bits = changed + 1, set_bits + new
      end
    end
  end
  if #keys > 0 then
    redis.call('SETRANGE', bits, 28, struct.pack('<I7I7', changed, set_bits))
  end
  return 1
end

if #in_active > entry * most or #in_building > entry * most then
  return redis.error_reply('TOLLGATE an exists filter takes at most 128 keys in one call')
end
local found, since_ms = read_ids(versions)
if found == '' then
  local time = redis.call('TIME')
  local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  -- Redis may have evicted versions a moment ago, so others may still use them. If since_ms is later than now_ms, the clock of the server
  -- was set back.
  since_ms = math.min(since_ms or now_ms, now_ms)
  redis.call('SET', versions, '\1' .. struct.pack('<I7', since_ms), 'PX', keep_ms)
  return {2, now_ms - since_ms, 0}
end
if found ~= seen then
  return {0, 0, 0}
end
local is_active, is_building = add(active, in_active), add(building, in_building)
redis.call('PEXPIRE', active, ttl_ms)
if build_ms ~= '0' then
  redis.call('PEXPIRE', building, build_ms)
end
redis.call('PEXPIRE', versions, keep_ms)
return {1, is_active, is_building}
