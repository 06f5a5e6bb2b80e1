-- lock_exchange: a batch of lock_release for several leases, then of lock_acquire for several locks. All are independent: each is released
-- or granted by itself. It serves calls that are made at the same time and would cost a round trip each. A lock may occur more than once,
-- also in a release and in an acquisition.
--
-- KEYS[1]  keys     leases to acquire, strings, see lock_acquire            prefix:2:{lock:<name>:<key>}:lease
--                   then leases to release, at most 64 in all
--                   then the channels of the released                       prefix:2:{lock:<name>:<key>}:free
-- ARGV[1]  tokens   16 random bytes a lease, new for each acquisition, in the order of the leases
-- ARGV[2]  ttl_ms   of the acquired leases, integer, 10 to 86400000
-- ARGV[3]  fences   how many fences to reserve for each, 1 to 65536
-- ARGV[4]  keep_ms  how long the last fence is remembered after the leases, or four fifths of that
-- ARGV[5]  floor    all granted fences are larger than this number, which is below 2^53
--
-- Value    leases: see lock_acquire. A grant in the same fifth of keep_ms as the last one writes the expiry only if its lease is longer.
--          So fences are remembered for at least four fifths of keep_ms. A released lease ends at 0 and keeps its expiry;
--          channels: 1
-- Returns  {fence, then for some leases: position from 1, and answer}. Leases without an answer: acquired ones are granted with this first
--          fence, released ones are free and have no listeners. Answers: acquired, another first fence, or -remaining_ms if others hold
--          it; released, 1 + listeners. 0: nothing was done; call lock_acquire or lock_release. Both are 0 for several holders, foreign
--          values and failed writes. A release is 0 for another token, an ended lease, and a lease that ends in more than ten minutes. A
--          release is also 0 for a fence ahead of the clock, and for a holder from the fair queue. An acquisition is 0 for another kind and
--          a clock step back
-- Errors   none of its own
-- Repeat   harmless: the token of a holder renews its lease and gets the same fences; a token without a lease releases nothing
local keys, tokens, ttl_ms, fences, keep_ms, floor = KEYS, ARGV[1], ARGV[2] + 0, ARGV[3] + 0, ARGV[4] + 0, ARGV[5] + 0
local pcall, pack, unpack_value, ceil, sub = redis.pcall, struct.pack, struct.unpack, math.ceil, string.sub
local TEN_MINUTES, NEVER = 600 * 1000000, '\0\0\0\0\0\0\0'

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
-- A token for each lease, and a channel for each released lease.
local min_fence = math.max(floor + 1, now)
local count = math.min(#tokens / 16, 64)
local releases = #keys - count
local acquisitions = count - releases
local stored = redis.call('MGET', unpack(keys, 1, count))
-- Values written by this call; `false` for released leases.
local written, answers = {}, {min_fence}

if releases > 0 then
  -- Numbers of listeners, in pairs with their channels. A PUBLISH costs as much as asking about two channels. Without the right to ask,
  -- publish to all channels.
  local listener_counts = pcall('PUBSUB', 'NUMSUB', unpack(keys, count + 1, count + releases))
  for i = acquisitions + 1, count do
    local lease, value = keys[i], stored[i]
    local answer = 0
    if value and #value == 42 and sub(value, 27) == sub(tokens, 16 * i - 15, 16 * i) and written[lease] == nil then
      local held_as, _, ends, length_ms, first = unpack_value('<BI7I7I4I7', value)
      -- Overwrite the end in place if the first fence is not ahead of the clock: the next grant takes this fence for the time of the grant,
      -- to decide whether the expiry is long enough. A long lease must not
      -- keep its key for that long.
      if (held_as == 1 or held_as == 2) and ends > now and ends - now <= TEN_MINUTES and ends - length_ms * 1000 >= first then
        if type(pcall('SETRANGE', lease, '8', NEVER)) == 'number' then
          written[lease], answer = false, 1
          if listener_counts[2 * (i - acquisitions)] ~= 0 then
            -- Without the right to publish, waiters poll.
            local listeners = pcall('PUBLISH', keys[releases + i], '1')
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

if acquisitions > 0 then
  local ends, expiry_ms = now + ttl_ms * 1000, string.format('%d', ttl_ms + keep_ms)
  local since = now - now % (keep_ms * 200)
  -- The value up to the token, if the stored fence does not matter.
  local new_prefix = pack('<BI7I7I4I7', 1, min_fence + fences - 1, ends, ttl_ms, min_fence)
  for i = 1, acquisitions do
    local lease, token = keys[i], sub(tokens, 16 * i - 15, 16 * i)
    local value = written[lease]
    if value == nil then
      value = stored[i]
    elseif not value then
      value = sub(stored[i], 1, 8) .. NEVER .. sub(stored[i], 16)
    end
    local is_plain, keeps_expiry, remaining_us, fence, its_first, held_as = true, false, 0, 0, 0, 0
    if value then
      local its_end, length_ms = 0, 0
      if #value == 42 then
        held_as, fence, its_end, length_ms, its_first = unpack_value('<BI7I7I4I7', value)
        remaining_us = its_end - now
        -- The last grant was in this fifth of keep_ms by the clock, so the expiry is long enough.
        keeps_expiry = its_first >= since and length_ms >= ttl_ms and (its_end == 0 or its_end - length_ms * 1000 >= its_first)
      elseif #value == 8 then
        held_as, fence = unpack_value('<BI7', value)
      end
      -- A lease that ends later than its length from now predates a clock step back.
      is_plain = held_as >= 1 and held_as <= 6 and remaining_us <= length_ms * 1000
    end
    local answer = 0
    if is_plain and remaining_us > 0 and sub(value, 27) ~= token then
      answer = (held_as == 1 or held_as == 3) and -ceil(remaining_us / 1000) or 0
    elseif is_plain then
      local first, new_value, result = min_fence, nil, nil
      if remaining_us > 0 then
        first = its_first
        new_value = pack('<BI7I7I4I7', 1, fence, ends, ttl_ms, first) .. token
      elseif fence < min_fence then
        new_value = new_prefix .. token
      else
        -- Above the clock, in case the last fence was forgotten; above the last fence, in case the clock was set back.
        first = fence + 1
        new_value = pack('<BI7I7I4I7', 1, fence + fences, ends, ttl_ms, first) .. token
      end
      if keeps_expiry and remaining_us <= 0 and fence < min_fence then
        result = pcall('SETRANGE', lease, '0', new_value)
      elseif value then
        result = pcall('SET', lease, new_value, 'PX', expiry_ms)
      else
        -- MGET also reads a key of another type as nil.
        result = pcall('SET', lease, new_value, 'PX', expiry_ms, 'NX')
      end
      if result and not (type(result) == 'table' and result.err) then
        written[lease], answer = new_value, first
      end
    end
    if answer ~= min_fence then
      answers[#answers + 1] = i
      answers[#answers + 1] = answer
    end
  end
end
return answers
