-- lock_exchange: the same as lock_release for several leases, and then the same as lock_acquire for several locks, all of which have nothing to
-- do with each other, one after the other: each is given back or granted by itself. For what is asked for at the same time, of which
-- each would pay for a call of its own. A lock may be there more than once, also on both sides.
--
-- KEYS[1]  keys     the leases that are wanted, strings, see lock_acquire   prefix:2:{lock:<namespace>:<subject>}:lease
--                   then those that are given back, at most 64 with the former
--                   then the channels of the latter                         prefix:2:{lock:<namespace>:<subject>}:free
-- ARGV[1]  tokens   16 random bytes a lease, others for each acquisition, in the order of the leases, one after the other
-- ARGV[2]  ttl_ms   of what is wanted, integer, 10 to 86400000
-- ARGV[3]  fences   how many fencing tokens to set aside for each, 1 to 65536
-- ARGV[4]  keep_ms  how long the last fence is remembered after the leases, or four fifths of that
-- ARGV[5]  floor    all fences that are granted are larger than this number, which is below 2^53
--
-- Value    leases: see lock_acquire. Their time to live is that of a grant in the same fifth of `keep_ms` as the last one, so it is not
--          written again in there unless the lease is longer; what it says is remembered for no less than four fifths of `keep_ms` after it.
--          What is given back here ends at 0, and goes on to live as long as it did; channels: 1
-- Returns  {fence, then for some of the leases: which one, from 1, and answer}: of those that are not named here what is wanted is granted, with
--          this as its first fence, and what is given back is free, and nobody listens. Otherwise what is wanted has another first fence, or less
--          than 0 if others hold it: -remaining_ms; what is given back has 1 + listeners; and 0 says that nothing was done, and lock_acquire or
--          lock_release is to be asked: several hold it, or a lock of another kind, it is not held by this token, or for long, somebody may stand in line, the
--          clock was set back, it cannot be written
-- Errors   none of its own
-- Repeat   harmless: with the token of a holder its lease is made to last its whole length again, with the same fences; a token that holds
--          no lease gives nothing back
local keys, tokens, ttl_ms, fences, keep_ms, floor = KEYS, ARGV[1], ARGV[2] + 0, ARGV[3] + 0, ARGV[4] + 0, ARGV[5] + 0
local pcall, pack, unpack_value, ceil, sub = redis.pcall, struct.pack, struct.unpack, math.ceil, string.sub
local TEN_MINUTES, NEVER = 600 * 1000000, '\0\0\0\0\0\0\0'

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
-- There is a token for each lease, and a channel for each that is given back.
local least = math.max(floor + 1, now)
local count = math.min(#tokens / 16, 64)
local given = #keys - count
local wanted = count - given
local stored = redis.call('MGET', unpack(keys, 1, count))
-- What was written since then; `false` is what was given back.
local written, answers = {}, {least}

if given > 0 then
  -- Who listens, by twos. To publish costs as much as to ask about two channels. A user who may not ask publishes to all of them.
  local heard = pcall('PUBSUB', 'NUMSUB', unpack(keys, count + 1, count + given))
  for i = wanted + 1, count do
    local lease, value = keys[i], stored[i]
    local answer = 0
    if value and #value == 42 and sub(value, 27) == sub(tokens, 16 * i - 15, 16 * i) and written[lease] == nil then
      local held_as, _, ends, length_ms, first = unpack_value('<BI7I7I4I7', value)
      -- By one who came at the right moment. With fences that are ahead of the clock nothing is known of its time to live, see below. And one
      -- that would have gone on for long is not to leave its key behind for as long.
      if (held_as == 1 or held_as == 2) and ends > now and ends - now <= TEN_MINUTES and ends - length_ms * 1000 >= first then
        if type(pcall('SETRANGE', lease, '8', NEVER)) == 'number' then
          written[lease], answer = false, 1
          if heard[2 * (i - wanted)] ~= 0 then
            -- A user who may not publish still gives the lease back; those who wait look now and then.
            local listeners = pcall('PUBLISH', keys[given + i], '1')
            answer = type(listeners) == 'number' and 1 + listeners or 1
          end
        end
      end
    end
    if answer ~= 1 then
      answers[#answers + 1] = i
      answers[#answers + 1] = answer
    end
  end
end

if wanted > 0 then
  local ends, life = now + ttl_ms * 1000, string.format('%d', ttl_ms + keep_ms)
  local since = now - now % (keep_ms * 200)
  -- What comes before the token where the stored fence has no say.
  local fresh = pack('<BI7I7I4I7', 1, least + fences - 1, ends, ttl_ms, least)
  for i = 1, wanted do
    local lease, token = keys[i], sub(tokens, 16 * i - 15, 16 * i)
    local value = written[lease]
    if value == nil then
      value = stored[i]
    elseif not value then
      value = sub(stored[i], 1, 8) .. NEVER .. sub(stored[i], 16)
    end
    local is_plain, lives, left, fence, its_first, held_as = true, false, 0, 0, 0, 0
    if value then
      local its_end, length_ms = 0, 0
      if #value == 42 then
        held_as, fence, its_end, length_ms, its_first = unpack_value('<BI7I7I4I7', value)
        left = its_end - now
        -- Granted in this fifth, by the clock and not ahead of it, which is when its time to live was written or was known to be long enough.
        lives = its_first >= since and length_ms >= ttl_ms and (its_end == 0 or its_end - length_ms * 1000 >= its_first)
      elseif #value == 8 then
        held_as, fence = unpack_value('<BI7', value)
      end
      -- A lease that would last longer than it is long was written before the clock was set back.
      is_plain = held_as >= 1 and held_as <= 6 and left <= length_ms * 1000
    end
    local answer = 0
    if is_plain and left > 0 and sub(value, 27) ~= token then
      answer = (held_as == 1 or held_as == 3) and -ceil(left / 1000) or 0
    elseif is_plain then
      local first, mine, done = least, nil, nil
      if left > 0 then
        first = its_first
        mine = pack('<BI7I7I4I7', 1, fence, ends, ttl_ms, first) .. token
      elseif fence < least then
        mine = fresh .. token
      else
        -- The clock alone would do, were it never set back; the last fence alone would do, were it never forgotten.
        first = fence + 1
        mine = pack('<BI7I7I4I7', 1, fence + fences, ends, ttl_ms, first) .. token
      end
      if lives and left <= 0 and fence < least then
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
    if answer ~= least then
      answers[#answers + 1] = i
      answers[#answers + 1] = answer
    end
  end
end
return answers
