-- lock_acquire_many: the same as lock_acquire for several locks that have nothing to do with each other, one after the other: each is
-- granted or not by itself. For locks that are asked for at the same time, of which each would pay for a call of its own. A lock
-- may be there more than once.
--
-- KEYS[1]  leases   strings, see lock_acquire; at most 64 of them     prefix:2:{lock:<namespace>:<subject>}:lease
-- ARGV[1]  ttl_ms   integer, 10 to 86400000
-- ARGV[2]  fences   how many fencing tokens to set aside for each, 1 to 65536
-- ARGV[3]  keep_ms  how long the last fence is remembered after the leases
-- ARGV[4]  tokens   16 random bytes a lease, others for each acquisition
--
-- Value    leases: see lock_acquire
-- Returns  for each lease its first fence if it is granted, less than 0 if others hold it: -remaining_ms, or 0 if nothing was done, and
--          lock_acquire is to be asked: several hold it, the clock was set back, it cannot be written
-- Errors   none of its own
-- Repeat   harmless: with the token of a holder its lease is made to last its whole length again, with the same fences
local leases, ttl_ms, fences, keep_ms, tokens = KEYS, ARGV[1] + 0, ARGV[2] + 0, ARGV[3] + 0, 3
local pcall, pack, unpack_value, ceil = redis.pcall, struct.pack, struct.unpack, math.ceil

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local ends, life = now + ttl_ms * 1000, string.format('%d', ttl_ms + keep_ms)
-- What comes before the token where the clock alone says which fence is next.
local fresh = pack('<BI7I7I4I7', 1, now + fences - 1, ends, ttl_ms, now)
local stored = redis.call('MGET', unpack(leases))
local written, answers = {}, {}
for i = 1, math.min(#leases, 64) do
  local lease, token = leases[i], ARGV[tokens + i]
  local value = written[lease] or stored[i]
  local is_plain, fence, left, first, holder = true, 0, 0, nil, nil
  if value then
    local held_as, size = value:byte(1), #value
    is_plain = (size == 8 or size == 42) and held_as >= 1 and held_as <= 3
    if is_plain then
      fence = unpack_value('<I7', value, 2)
    end
    if is_plain and size == 42 then
      local its_end, length_ms
      its_end, length_ms, first, holder = unpack_value('<I7I4I7c16', value, 9)
      left = its_end - now
      -- Otherwise it was written before the clock was set back.
      is_plain = left <= length_ms * 1000
    end
  end
  if not is_plain then
    answers[i] = 0
  elseif left > 0 and holder ~= token then
    answers[i] = -ceil(left / 1000)
  else
    local mine
    if left > 0 then
      mine = pack('<BI7I7I4I7', 1, fence, ends, ttl_ms, first) .. token
    elseif fence < now then
      first, mine = now, fresh .. token
    else
      -- The clock alone would do, were it never set back; the last fence alone would do, were it never forgotten.
      first = fence + 1
      mine = pack('<BI7I7I4I7', 1, fence + fences, ends, ttl_ms, first) .. token
    end
    local done
    if value then
      done = pcall('SET', lease, mine, 'PX', life)
    else
      -- What is read as nothing may be something else than a string.
      done = pcall('SET', lease, mine, 'PX', life, 'NX')
    end
    if done and not done.err then
      written[lease], answers[i] = mine, first
    else
      answers[i] = 0
    end
  end
end
return answers
