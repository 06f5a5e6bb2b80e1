-- lock_release: release a lease that the token still holds, or leave the queue for it, and notify a waiter.
--
-- KEYS[1]  lease      string, see lock_acquire                 prefix:2:{lock:<name>:<key>}:lease
-- KEYS[2]  queue      sorted set, see lock_queue               prefix:2:{lock:<name>:<key>}:queue
-- KEYS[3]  positions  sorted set, see lock_queue               prefix:2:{lock:<name>:<key>}:positions
--                     Left out while a slot moves, since a node refuses several keys then: the queue is taken to be empty
-- ARGV[1]  token      of the acquisition
-- ARGV[2]  keep_ms    how long the last fence is remembered, or up to twice that
-- ARGV[3]  channel    channel of the waiters. Not in KEYS: a node with a moving slot would look for a key of that name
--                                                              prefix:2:{lock:<name>:<key>}:free
-- ARGV[4]  publish    SPUBLISH on a cluster; left out elsewhere, which means PUBLISH
--
-- Value    lease: see lock_acquire. The lease of a single holder may end at 0 and keep its expiry; otherwise the holder is removed.
--          queue, positions: see lock_queue.
--          channel: the token of the first waiter in the queue, or 1 without a queue
-- Returns  1 + listeners: released; -listeners: the lease had ended, or the token was only queued; 0 also if the token holds nothing
-- Errors   WRONGTYPE
-- Repeat   harmless: a token without a lease and without a position changes nothing
local lease, queue, positions = KEYS[1], KEYS[2], KEYS[3]
local token, keep_ms, channel, publish = ARGV[1], ARGV[2] + 0, ARGV[3], ARGV[4] or 'PUBLISH'

local stored = redis.call('GET', lease) or ''
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local was_held, message = 0, '1'
local held_as, ends, length_ms, first, holder, _
if #stored == 42 then
  held_as, _, ends, length_ms, first, holder = struct.unpack('<BI7I7I4I7c16', stored)
end
-- The common case: overwrite the end of the lease with 0 and keep the expiry. With a first fence ahead of the clock, the next grant could
-- not tell when this one was made, and so whether the expiry is long enough. The user may lack the right to SETRANGE.
if holder == token and (held_as == 1 or held_as == 2) and ends > now and ends - now <= keep_ms * 1000 and ends - length_ms * 1000 >= first
  and type(redis.pcall('SETRANGE', lease, '8', '\0\0\0\0\0\0\0')) == 'number' then
  was_held = 1
else
  held_as = stored:byte(1) or 1
  if held_as < 1 or held_as > 6 or (#stored > 0 and (#stored - 8) % 34 ~= 0) then
    return 0
  end
  local rest, latest = nil, now
  -- One iteration for each holder.
  for at = 9, #stored, 34 do
    local ends, _, _, holder = struct.unpack('<I7I4I7c16', stored, at)
    -- A released lease may end at 0.
    if holder == token and ends > 0 then
      rest, was_held = stored:sub(1, at - 1) .. stored:sub(at + 34), ends > now and 1 or 0
    else
      latest = math.max(latest, ends)
    end
  end
  if rest then
    local lives_ms = math.ceil((latest - now) / 1000) + keep_ms
    -- On a full server the first write of a script must need no memory.
    redis.pcall('PEXPIRE', lease, lives_ms)
    redis.call('SET', lease, rest, 'PX', lives_ms)
  end
  if held_as > 2 or not rest then
    -- A user without the right to ZRANGE was never queued.
    local head = queue and redis.pcall('ZRANGE', queue, 0, 0)[1]
    local was_first = head and head:sub(2) == token
    -- Remove the token from the queue, also if its lease has ended and the token was queued again.
    if head and redis.call('ZREM', queue, '3' .. token, '4' .. token, '5' .. token, '6' .. token) > 0 then
      redis.call('ZREM', positions, '3' .. token, '4' .. token, '5' .. token, '6' .. token)
      head = redis.call('ZRANGE', queue, 0, 0)[1]
    end
    if not rest and not was_first then
      return 0
    end
    -- A claim of another kind has to wait for all holders.
    if head and latest > now and head:sub(1, 1) ~= tostring(held_as) then
      return was_held
    end
    message = head and head:sub(2) or '1'
  end
end
-- Without the right to publish, waiters poll.
local listeners = redis.pcall(publish, channel, message)
if publish == 'SPUBLISH' and type(listeners) ~= 'number' then
  -- Redis 6.2 lacks SPUBLISH.
  listeners = redis.pcall('PUBLISH', channel, message)
end
if type(listeners) ~= 'number' then
  listeners = 0
end
return was_held == 1 and 1 + listeners or -listeners
