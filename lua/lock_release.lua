-- lock_release: give a lease back if it still belongs to the token, or leave the line for it, and tell those who wait.
--
-- KEYS[1]  lease    string, see lock_acquire                   prefix:2:{lock:<namespace>:<subject>}:lease
-- KEYS[2]  line     sorted set, see lock_line                  prefix:2:{lock:<namespace>:<subject>}:line
-- KEYS[3]  places   sorted set, see lock_line                  prefix:2:{lock:<namespace>:<subject>}:places
--                   Without these two nobody is taken to stand in line: while a slot moves, a node refuses who has several keys
-- ARGV[1]  token    of the acquisition
-- ARGV[2]  keep_ms  how long the last fence is remembered, or up to twice that
-- ARGV[3]  channel  where those who wait for it listen. No key, since there is never one of that name, which a moving slot would be
--                   asked for                                  prefix:2:{lock:<namespace>:<subject>}:free
-- ARGV[4]  publish  SPUBLISH on a cluster; elsewhere it is left out, which is PUBLISH
--
-- Value    lease: see lock_acquire. What one held alone ends at 0, and goes on to live as long as it did; line, places: see lock_line.
--          channel: the token of who is first in the line, or 1 where nobody stands in line
-- Returns  1 + listeners, given back; -listeners, it had ended already, or was only waited for; 0 also if it is not this token's
-- Errors   WRONGTYPE
-- Repeat   harmless: a token that holds no lease and stands in no line changes nothing
local lease, line, places = KEYS[1], KEYS[2], KEYS[3]
local token, keep_ms, channel, publish = ARGV[1], ARGV[2] + 0, ARGV[3], ARGV[4] or 'PUBLISH'

local stored = redis.call('GET', lease) or ''
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local was_held, message = 0, '1'
local held_as, ends, length_ms, first, holder, _
if #stored == 42 then
  held_as, _, ends, length_ms, first, holder = struct.unpack('<BI7I7I4I7c16', stored)
end
-- By one who came at the right moment, and not to stay for much longer than it is remembered. With fences that are ahead of the clock
-- nothing is known of its time to live: see lock_acquire. A user may have no right to write into it.
if holder == token and (held_as == 1 or held_as == 2) and ends > now and ends - now <= keep_ms * 1000 and ends - length_ms * 1000 >= first
  and type(redis.pcall('SETRANGE', lease, '8', '\0\0\0\0\0\0\0')) == 'number' then
  was_held = 1
else
  held_as = stored:byte(1) or 1
  if held_as < 1 or held_as > 6 or (#stored > 0 and (#stored - 8) % 34 ~= 0) then
    return 0
  end
  local rest, latest = nil, now
  -- As many turns as there are holders.
  for at = 9, #stored, 34 do
    local ends, _, _, holder = struct.unpack('<I7I4I7c16', stored, at)
    -- What was given back may end at 0.
    if holder == token and ends > 0 then
      rest, was_held = stored:sub(1, at - 1) .. stored:sub(at + 34), ends > now and 1 or 0
    else
      latest = math.max(latest, ends)
    end
  end
  if rest then
    local lives_ms = math.ceil((latest - now) / 1000) + keep_ms
    -- Where memory is full, something has to be written first that needs none.
    redis.pcall('PEXPIRE', lease, lives_ms)
    redis.call('SET', lease, rest, 'PX', lives_ms)
  end
  if held_as > 2 or not rest then
    -- A user who may not do this has never stood in a line.
    local head = line and redis.pcall('ZRANGE', line, 0, 0)[1]
    local was_first = head and head:sub(2) == token
    -- Also of a lease that ended, if the token came to stand in line again.
    if head and redis.call('ZREM', line, '3' .. token, '4' .. token, '5' .. token, '6' .. token) > 0 then
      redis.call('ZREM', places, '3' .. token, '4' .. token, '5' .. token, '6' .. token)
      head = redis.call('ZRANGE', line, 0, 0)[1]
    end
    if not rest and not was_first then
      return 0
    end
    -- Whoever wants it in another way than it is held has to wait for all of them.
    if head and latest > now and head:sub(1, 1) ~= tostring(held_as) then
      return was_held
    end
    message = head and head:sub(2) or '1'
  end
end
-- A user who may not publish still gives the lease back; those who wait look now and then.
local listeners = redis.pcall(publish, channel, message)
if publish == 'SPUBLISH' and type(listeners) ~= 'number' then
  -- Redis 6.2 does not know it.
  listeners = redis.pcall('PUBLISH', channel, message)
end
if type(listeners) ~= 'number' then
  listeners = 0
end
return was_held == 1 and 1 + listeners or -listeners
