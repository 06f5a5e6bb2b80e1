-- lock_acquire_many: the same as lock_acquire for several locks that have nothing to do with each other, one after the other: each is
-- granted or not by itself. For locks that are asked for at the same time, of which each would pay for a call of its own. A lock
-- may be there more than once.
--
-- KEYS[1]  leases   strings, see lock_acquire; at most 64 of them     prefix:2:{lock:<namespace>:<subject>}:lease
-- ARGV[1]  ttl_ms   integer, 10 to 86400000
-- ARGV[2]  fences   how many fencing tokens to set aside for each, 1 to 65536
-- ARGV[3]  keep_ms  how long the last fence is remembered after the leases, or four fifths of that
-- ARGV[4]  tokens   16 random bytes a lease, others for each acquisition, one after the other
--
-- Value    leases: see lock_acquire. Their time to live is that of a grant in the same fifth of `keep_ms` as the last one, so it is not
--          written again in there unless the lease is longer; what it says is remembered for no less than four fifths of `keep_ms` after it
-- Returns  {fence, then for some of the leases: which one, from 1, and answer}: the first fence of those that are not named here, which
--          are granted; answer is another first fence, or less than 0 if others hold it: -remaining_ms, or 0 if nothing was done, and
--          lock_acquire is to be asked: several hold it, the clock was set back, it cannot be written
-- Errors   none of its own
-- Repeat   harmless: with the token of a holder its lease is made to last its whole length again, with the same fences
local leases, ttl_ms, fences, keep_ms, tokens = KEYS, ARGV[1] + 0, ARGV[2] + 0, ARGV[3] + 0, ARGV[4]
local pcall, pack, unpack_value, ceil, sub = redis.pcall, struct.pack, struct.unpack, math.ceil, string.sub

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local ends, life = now + ttl_ms * 1000, string.format('%d', ttl_ms + keep_ms)
local since = now - now % (keep_ms * 200)
-- What comes before the token where the clock alone says which fence is next.
local fresh = pack('<BI7I7I4I7', 1, now + fences - 1, ends, ttl_ms, now)
local stored = redis.call('MGET', unpack(leases))
local written, answers = {}, {now}
for i = 1, math.min(#leases, 64) do
  local lease, token = leases[i], sub(tokens, 16 * i - 15, 16 * i)
  local value = written[lease] or stored[i]
  local is_plain, lives, left, fence, its_first = true, false, 0, 0, 0
  if value then
    local held_as, its_end, length_ms = 0, 0, 0
    if #value == 42 then
      held_as, fence, its_end, length_ms, its_first = unpack_value('<BI7I7I4I7', value)
      left = its_end - now
      -- Granted in this fifth, by the clock and not ahead of it, which is when its time to live was written or was known to be long enough.
      lives = its_first >= since and length_ms >= ttl_ms and (its_end == 0 or its_end - length_ms * 1000 >= its_first)
    elseif #value == 8 then
      held_as, fence = unpack_value('<BI7', value)
    end
    -- A lease that would last longer than it is long was written before the clock was set back.
    is_plain = held_as >= 1 and held_as <= 3 and left <= length_ms * 1000
  end
  local answer = 0
  if is_plain and left > 0 and sub(value, 27) ~= token then
    answer = -ceil(left / 1000)
  elseif is_plain then
    local first, mine, done = now, nil, nil
    if left > 0 then
      first = its_first
      mine = pack('<BI7I7I4I7', 1, fence, ends, ttl_ms, first) .. token
    elseif fence < now then
      mine = fresh .. token
    else
      -- The clock alone would do, were it never set back; the last fence alone would do, were it never forgotten.
      first = fence + 1
      mine = pack('<BI7I7I4I7', 1, fence + fences, ends, ttl_ms, first) .. token
    end
    if lives and left <= 0 and fence < now then
      done = pcall('SETRANGE', lease, '0', mine)
    elseif value then
      done = pcall('SET', lease, mine, 'PX', life)
    else
      -- What is read as nothing may be something else than a string.
      done = pcall('SET', lease, mine, 'PX', life, 'NX')
    end
    if done and not (type(done) == 'table' and done.err) then
      written[lease], answer = mine, first
    end
  end
  if answer ~= now then
    answers[#answers + 1] = i
    answers[#answers + 1] = answer
  end
end
return answers
