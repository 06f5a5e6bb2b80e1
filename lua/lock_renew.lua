-- lock_renew: let leases last their whole length from now on, each if it still belongs to its token.
--
-- KEYS[1]  leases   strings, see lock_acquire; one key a lease, at most 128  prefix:2:{lock:<namespace>:<subject>}:lease
-- ARGV[1]  keep_ms  how long the last fence is remembered after a lease
-- ARGV[2]  terms    token and ttl_ms, two arguments a lease
--
-- Value    leases: see lock_acquire
-- Returns  a number a lease: 1 renewed, 0 not held by this token any more, whatever is in its place
-- Errors   whatever else keeps GET from reading, a right that is missing for instance; leases before it have been renewed
-- Repeat   harmless: a lease that is gone never comes back by this
local leases, keep_ms, terms = KEYS, ARGV[1] + 0, 2

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local answers = {}
for i = 1, math.min(#leases, 128) do
  local token, ttl_ms = ARGV[terms], ARGV[terms + 1] + 0
  terms = terms + 2
  -- What others wrote in the place of one lease is nothing to the others.
  local stored = redis.pcall('GET', leases[i]) or ''
  if type(stored) == 'table' then
    if not stored.err:find('WRONGTYPE', 1, true) then
      return stored
    end
    stored = ''
  end
  local renewed, latest = nil, now
  local held_as = stored:byte(1) or 0
  if held_as >= 1 and held_as <= 3 and (#stored - 8) % 34 == 0 then
    -- As many turns as there are holders.
    for at = 9, #stored, 34 do
      local ends, _, first, holder = struct.unpack('<I7I4I7c16', stored, at)
      -- Whoever comes after the end may have been told already that the lease is free.
      if holder == token and ends > now then
        ends = now + ttl_ms * 1000
        local mine = struct.pack('<I7I4I7c16', ends, ttl_ms, first, token)
        renewed = stored:sub(1, at - 1) .. mine .. stored:sub(at + 34)
      end
      latest = math.max(latest, ends)
    end
  end
  answers[i] = 0
  if renewed then
    local lives_ms = math.ceil((latest - now) / 1000) + keep_ms
    -- Where memory is full, something has to be written first that needs none.
    redis.pcall('PEXPIRE', leases[i], lives_ms)
    redis.call('SET', leases[i], renewed, 'PX', lives_ms)
    answers[i] = 1
  end
end
return answers
