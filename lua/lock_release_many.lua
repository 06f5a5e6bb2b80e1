-- lock_release_many: the same as lock_release for several leases that have nothing to do with each other, one after the other. For those that are
-- given back at the same time, of which each would pay for a call of its own.
--
-- KEYS[1]  keys     the leases, at most 64, strings, see lock_acquire   prefix:2:{lock:<namespace>:<subject>}:lease
--                   then the channels in the same order                 prefix:2:{lock:<namespace>:<subject>}:free
-- ARGV[1]  tokens   of the acquisitions, 16 bytes each, one after the other
--
-- Value    leases: see lock_acquire. What is given back here ends at 0, and goes on to live as long as it did; channels: 1
-- Returns  {1, then for some of the leases: which one, from 1, and answer}: those that are not named here are given back, and nobody
--          listens; answer is 1 + listeners if it is given back, or 0 if nothing was done, and lock_release is to be asked: it is not
--          held by this token alone, or for long, somebody may stand in line, the clock was set back, it cannot be written
-- Errors   none of its own
-- Repeat   harmless: a token that holds no lease changes nothing
local keys, tokens = KEYS, ARGV[1]
local pcall, unpack_value, sub = redis.pcall, struct.unpack, string.sub
local TEN_MINUTES = 600 * 1000000

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local count = math.min(#keys / 2, 64)
local stored = redis.call('MGET', unpack(keys, 1, count))
-- Who listens, by twos. To publish costs as much as to ask about two channels. A user who may not ask publishes to all of them.
local heard = pcall('PUBSUB', 'NUMSUB', unpack(keys, count + 1, 2 * count))
local written, answers = {}, {1}
for i = 1, count do
  local lease, value = keys[i], stored[i]
  local answer = 0
  if value and #value == 42 and sub(value, 27) == sub(tokens, 16 * i - 15, 16 * i) and not written[lease] then
    local held_as, _, ends, length_ms, first = unpack_value('<BI7I7I4I7', value)
    -- By one who came at the right moment. With fences that are ahead of the clock nothing is known of its time to live: see lock_acquire_many.
    -- And one that would have gone on for long is not to leave its key behind for as long.
    if held_as == 1 and ends > now and ends - now <= TEN_MINUTES and ends - length_ms * 1000 >= first then
      if type(pcall('SETRANGE', lease, '8', '\0\0\0\0\0\0\0')) == 'number' then
        written[lease], answer = true, 1
        if heard[2 * i] ~= 0 then
          -- A user who may not publish still gives the lease back; those who wait look now and then.
          local listeners = pcall('PUBLISH', keys[count + i], '1')
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
return answers
