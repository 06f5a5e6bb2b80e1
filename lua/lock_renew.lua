-- lock_renew: renew leases that their tokens still hold.
--
-- KEYS[1]  leases    strings, see lock_acquire; one key a lease, at most 128  prefix:2:{lock:<name>:<key>}:lease
--                    Leases of one key should be adjacent
-- ARGV[1]  keep_ms   how long the last fence is remembered after a lease
-- ARGV[2]  renewals  token and ttl_ms, two arguments a lease
--
-- Value    leases: see lock_acquire
-- Returns  a number a lease: 1 renewed, 0 the token no longer holds it
-- Errors   a failure of GET other than WRONGTYPE, for instance NOPERM; earlier leases have been renewed
-- Repeat   harmless: a lost lease stays lost
local leases, keep_ms, renewals = KEYS, ARGV[1] + 0, ARGV
local HOLDER, FORMAT = 34, '<I7I4I7c16'

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local answers = {}
local count = math.min(#leases, 128)
local i = 1
while i <= count do
  local lease, last = leases[i], i
  -- Leases of one key are read and written together: a semaphore has up to a thousand holders.
  while last < count and leases[last + 1] == lease do
    last = last + 1
  end
  -- Foreign data in one key does not affect the other leases.
  local stored = redis.pcall('GET', lease) or ''
  if type(stored) == 'table' then
    if not stored.err:find('WRONGTYPE', 1, true) then
      return stored
    end
    stored = ''
  end
  local holders, indexes, latest, is_renewed = {}, {}, now, false
  local held_as = stored:byte(1) or 0
  if held_as >= 1 and held_as <= 6 and (#stored - 8) % HOLDER == 0 then
    -- One iteration for each holder.
    for at = 9, #stored, HOLDER do
      local ends, _, _, holder = struct.unpack(FORMAT, stored, at)
      holders[#holders + 1] = stored:sub(at, at + HOLDER - 1)
      -- Past its end, another caller may already have seen the lease as free.
      if ends > now then
        indexes[holder] = #holders
      end
      latest = math.max(latest, ends)
    end
  end
  for index = i, last do
    local token, ttl_ms = renewals[2 * index], renewals[2 * index + 1] + 0
    local holder_index = indexes[token]
    answers[index] = holder_index and 1 or 0
    if holder_index then
      local _, _, first = struct.unpack(FORMAT, holders[holder_index])
      local ends = now + ttl_ms * 1000
      holders[holder_index] = struct.pack(FORMAT, ends, ttl_ms, first, token)
      latest, is_renewed = math.max(latest, ends), true
    end
  end
  if is_renewed then
    local lives_ms = math.ceil((latest - now) / 1000) + keep_ms
    -- On a full server the first write of a script must need no memory.
    redis.pcall('PEXPIRE', lease, lives_ms)
    redis.call('SET', lease, stored:sub(1, 8) .. table.concat(holders), 'PX', lives_ms)
  end
  i = last + 1
end
return answers
