-- idempotency_record: read the record of an operation.
--
-- Errors   TOLLGATE if these scripts did not write the value; WRONGTYPE
local record = KEYS[1]

local stored = redis.call('GET', record)
if stored and (#stored < 80 or stored:byte(1) ~= 1 or stored:byte(2) > 3) then
  return redis.error_reply('TOLLGATE the value does not hold an operation of version 1')
end
