-- idempotency_renew: renew the lease of an attempt, and store its progress if there is any, if the token still holds the operation.
--
-- KEYS[1]  record      string, see idempotency_begin              prefix:2:{idempotency:<part>}:<scope>:<key>:record
-- ARGV[1]  token       of the attempt
-- ARGV[2]  lease_ms    integer, 10 to 86400000
-- ARGV[3]  keep_ms     how long the record is kept after the lease
-- ARGV[4]  body        24 bytes, the fingerprint of the body so far; a longer one in the record stays
-- ARGV[5]  checkpoint  bytes, see below; left out without progress
--
-- Value    record: see idempotency_begin; checkpoint: 4 bytes its number, little endian, 1 byte the length of the step, the step,
--          then its data
-- Returns  1 renewed, also if the lease had ended without a new attempt; 1 without a change if a later checkpoint exists; 0 the token lost
--          the operation
-- Errors   WRONGTYPE
-- Repeat   harmless: a late call replaces neither a later checkpoint nor a longer fingerprint
local record, token, lease_ms, keep_ms, body = KEYS[1], ARGV[1], ARGV[2] + 0, ARGV[3] + 0, ARGV[4]
local checkpoint = ARGV[5]

local stored = redis.call('GET', record) or ''
if #stored < 80 or stored:byte(1) ~= 1 or stored:byte(2) ~= 1 or stored:sub(41, 56) ~= token then
  return 0
end
if checkpoint and #stored > 84 and struct.unpack('<I4', stored, 81) > struct.unpack('<I4', checkpoint) then
  return 1
end
-- Renewals and checkpoints use different connections, so they may arrive out of order.
local kind, len = struct.unpack('<BI7', body)
local known_kind, known_len = struct.unpack('<BI7', stored, 57)
if known_len > len or (known_len == len and known_kind > kind) then
  body = stored:sub(57, 80)
end
local time = redis.call('TIME')
local ends = time[1] * 1000000 + time[2] + lease_ms * 1000
if not checkpoint then
  -- On a full server the first write of a script must need no memory.
  redis.pcall('PEXPIRE', record, lease_ms + keep_ms)
end
stored = stored:sub(1, 13) .. struct.pack('<I7I4', ends, lease_ms) .. stored:sub(25, 56) .. body .. (checkpoint or stored:sub(81))
redis.call('SET', record, stored, 'PX', lease_ms + keep_ms)
return 1
