-- lock_renew: let leases last their whole length from now on, each if it still belongs to its token.
--
-- KEYS[1]  leases   strings, see lock_acquire; one key a lease, at most 128  prefix:2:{lock:<namespace>:<subject>}:lease
-- ARGV[1]  keep_ms  how long the last fence is remembered after a lease
-- ARGV[2]  terms    token and ttl_ms, two arguments a lease
--
-- Value    leases: see lock_acquire
-- Returns  a number a lease: 1 renewed, 0 not held by this token any more
-- Errors   WRONGTYPE; leases before it have been renewed
-- Repeat   harmless: a lease that is gone never comes back by this
local leases, keep_ms, terms = KEYS, ARGV[1] + 0, 2

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local answers = {}
for i = 1, math.min(#leases, 128) do
  local token, ttl_ms = ARGV[terms], ARGV[terms + 1] + 0
  terms = terms + 2
  local stored = redis.call('GET', leases[i]) or ''
  answers[i] = 0
  if #stored == 35 and stored:byte(1) == 1 and stored:sub(20) == token then
    local fence, ends = struct.unpack('<I7I7', stored, 2)
    -- Whoever comes after the end may have been told already that the lease is free.
    if ends > now then
      stored = struct.pack('<BI7I7I4', 1, fence, now + ttl_ms * 1000, ttl_ms) .. token
      redis.call('SET', leases[i], stored, 'PX', ttl_ms + keep_ms)
      answers[i] = 1
    end
  end
end
return answers
