-- lock_release_many: the same as lock_release for several leases that have nothing to do with each other, one after the other. For those that are
-- given back at the same time, of which each would pay for a call of its own.
--
-- KEYS[1]  keys     the leases, at most 64, strings, see lock_acquire   prefix:2:{lock:<namespace>:<subject>}:lease
--                   then the channels in the same order                 prefix:2:{lock:<namespace>:<subject>}:free
-- ARGV[1]  keep_ms  how long the last fence is remembered after a lease
-- ARGV[2]  tokens   of the acquisitions
--
-- Value    leases: see lock_acquire; channels: 1
-- Returns  for each lease 1 + listeners if it is given back, or 0 if nothing was done, and lock_release is to be asked: it is not
--          held by this token alone, somebody may stand in line, it cannot be written
-- Errors   none of its own
-- Repeat   harmless: a token that holds no lease changes nothing
local keys, keep_ms, tokens = KEYS, ARGV[1] + 0, 1
local pcall, unpack_value = redis.pcall, struct.unpack

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local count, life = math.min(#keys / 2, 64), string.format('%d', keep_ms)
local stored = redis.call('MGET', unpack(keys, 1, count))
local written, answers = {}, {}
for i = 1, count do
  local lease, value = keys[i], stored[i]
  answers[i] = 0
  -- By one who came at the right moment.
  if value and #value == 42 and value:byte(1) == 1 and value:sub(27) == ARGV[tokens + i] and not written[lease] then
    local left = unpack_value('<I7', value, 9) - now
    if left > 0 then
      local done
      if left <= keep_ms * 1000 then
        -- It is there for as long as the fence is remembered, and not for long beyond that.
        done = pcall('SET', lease, value:sub(1, 8), 'KEEPTTL')
      else
        done = pcall('SET', lease, value:sub(1, 8), 'PX', life)
      end
      if not done.err then
        written[lease] = true
        -- A user who may not publish still gives the lease back; those who wait look now and then.
        local listeners = pcall('PUBLISH', keys[count + i], '1')
        answers[i] = type(listeners) == 'number' and 1 + listeners or 1
      end
    end
  end
end
return answers
