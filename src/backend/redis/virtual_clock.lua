-- virtual_clock: put in front of a script, lets it run on a clock of the test's choice.
--
-- TIME and everything that has to do with expiry is answered from the key {clock}:now, in us; all other commands are real.
-- An expiry lies beside its key, as the last millisecond in which the key is seen: this is how Redis expires keys too.
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

function virtual.SET(key, value, px, ms)
  assert(px == 'PX', 'a key is set without an expiry')
  real.call('SET', key, value)
  set_due(key, ms)
end

function virtual.PEXPIRE(key, ms)
  set_due(key, ms)
end

function virtual.PTTL(key)
  return tonumber(real.call('GET', key .. '#due') or tick - 2) - tick
end

function virtual.UNLINK(key)
  real.call('DEL', key, key .. '#due')
end

local redis = {error_reply = real.error_reply}

function redis.call(command, key, ...)
  if key then
    local due = real.call('GET', key .. '#due')
    if due and tick > tonumber(due) then
      real.call('DEL', key, key .. '#due')
    end
  end
  if virtual[command] then
    return virtual[command](key, ...)
  end
  return real.call(command, key, ...)
end

function redis.pcall(command, ...)
  return real.pcall(command, ...)
end
