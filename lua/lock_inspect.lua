-- lock_inspect: list the holders of a lease and their remaining time. Changes nothing.
--
-- KEYS[1]  lease  string, see lock_acquire  prefix:2:{lock:<name>:<key>}:lease
-- KEYS[2]  names  string, see lock_name     prefix:2:{lock:<name>:<key>}:names
-- ARGV[1]  max_holders  how many holders to list, 1 to 1000
--
-- Value    lease: see lock_acquire; names: see lock_name
-- Returns  {fence, holders, kind, then for each of the first `max_holders` holders: first fence, remaining_ms, held_ms, name}
--            fence    the last one, 0 if none is remembered
--            holders  their number
--            kind     the byte of the holders, see lock_acquire; meaningless without holders
--            name     empty if unset
-- Errors   TOLLGATE if these scripts did not write the value; WRONGTYPE
-- Repeat   harmless
local lease, names, max_holders = KEYS[1], KEYS[2], ARGV[1] + 0

local stored = redis.call('GET', lease)
if not stored then
  return {0, 0, 1}
end
local held_as = stored:byte(1) or 0
if #stored < 8 or (#stored - 8) % 34 ~= 0 or held_as < 1 or held_as > 6 then
  return redis.error_reply('TOLLGATE the value does not hold leases of version 1')
end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local called, at = {}, 2
local list = redis.call('GET', names) or ''
-- One iteration for each name.
while list:byte(1) == 1 and at + 16 <= #list do
  local length = list:byte(at + 16)
  called[list:sub(at, at + 15)] = list:sub(at + 17, at + 16 + length)
  at = at + 17 + length
end

local answer, holders = {(struct.unpack('<I7', stored, 2)), 0, held_as}, 0
-- One iteration for each holder.
for at = 9, #stored, 34 do
  local ends, length_ms, first, token = struct.unpack('<I7I4I7c16', stored, at)
  local left = math.min(ends - now, length_ms * 1000)
  if left > 0 then
    holders = holders + 1
    if holders <= max_holders then
      answer[#answer + 1] = first
      answer[#answer + 1] = math.ceil(left / 1000)
      -- A first fence is the time of its grant, unless the last fence or the floor was ahead of the clock.
      answer[#answer + 1] = math.max(0, math.floor((now - first) / 1000))
      answer[#answer + 1] = called[token] or ''
    end
  end
end
answer[2] = holders
return answer
