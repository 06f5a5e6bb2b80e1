-- lock_name: store the name of a holder of a lease, for lock_inspect.
--
-- KEYS[1]  lease  string, see lock_acquire                         prefix:2:{lock:<name>:<key>}:lease
-- KEYS[2]  names  string, expires with the lease                   prefix:2:{lock:<name>:<key>}:names
-- ARGV[1]  token  of the acquisition
-- ARGV[2]  name   at most 128 bytes
--
-- Value    names: 1 byte version 1, then for each named holder 16 bytes token, 1 byte length of the name, and the name.
--          lease: see lock_acquire
-- Returns  {1} stored; {0} the token holds no lease
-- Errors   WRONGTYPE
-- Repeat   harmless: the last name is kept
local lease, names, token, name = KEYS[1], KEYS[2], ARGV[1], ARGV[2]:sub(1, 128)

local stored = redis.call('GET', lease) or ''
local holds = {}
if (#stored - 8) % 34 == 0 then
  -- One iteration for each holder.
  for at = 9, #stored, 34 do
    -- A lease that lock_release or lock_exchange released may end at 0.
    holds[stored:sub(at + 18, at + 33)] = struct.unpack('<I7', stored, at) > 0
  end
end
if not holds[token] then
  return {0}
end
local kept, at = {'\1'}, 2
local list = redis.call('GET', names) or ''
-- As many turns as there are names: no more than there were holders.
while list:byte(1) == 1 and at + 16 <= #list do
  local length = list:byte(at + 16)
  local whose = list:sub(at, at + 15)
  if whose ~= token and holds[whose] then
    kept[#kept + 1] = list:sub(at, at + 16 + length)
  end
  at = at + 17 + length
end
kept[#kept + 1] = token .. string.char(#name) .. name
redis.call('SET', names, table.concat(kept), 'PX', math.max(1, redis.call('PTTL', lease)))
return {1}
