-- virtual_clock: the prelude of a script that runs on the clock of a test.
--
-- TIME and all commands about expiry use the key {clock}:now, in us. All other commands are real. The expiry of a key is stored in a
-- second key, as the last millisecond in which the key exists. Redis expires keys in the same way.
local real = redis
local now = tonumber(real.call('GET', '{clock}:now'))
local tick = math.floor(now / 1000)

local function set_due(key, ms)
  real.call('SET', key .. '#due', string.format('%d', tick + tonumber(ms)))
end

local virtual = {}

function virtual.TIME()
  return {string.format('%d', math.floor(now / 1000000)), string.format('%d', now % 1000000)}
end

function virtual.SET(key, value, px, ms, ...)
  if px == 'KEEPTTL' and real.call('EXISTS', key .. '#due') == 1 then
    return real.call('SET', key, value)
  end
  assert(px == 'PX', 'a key is set without an expiry')
  local done = real.call('SET', key, value, ...)
  if done then
    set_due(key, ms)
  end
  return done
end

function virtual.PEXPIRE(key, ms)
  if real.call('EXISTS', key) == 1 then
    set_due(key, ms)
  end
end

function virtual.PTTL(key)
  return tonumber(real.call('GET', key .. '#due') or tick - 2) - tick
end

function virtual.UNLINK(key)
  real.call('DEL', key, key .. '#due')
end

local redis = {error_reply = real.error_reply}

local function expire(key)
  local due = key and real.call('GET', key .. '#due')
  -- A set that was emptied is gone, and its expiry with it.
  if due and (tick > tonumber(due) or real.call('EXISTS', key) == 0) then
    real.call('DEL', key, key .. '#due')
  end
end

function redis.call(command, ...)
  -- All keys come first, and MGET has nothing else.
  for i = 1, command == 'MGET' and select('#', ...) or 1 do
    expire((select(i, ...)))
  end
  if virtual[command] then
    return virtual[command](...)
  end
  return real.call(command, ...)
end

-- No call of a test fails, so pcall is the same as call.
redis.pcall = redis.call
