-- idempotency_renew: renew the lease of an attempt, if the token still holds the operation.
--
-- KEYS[1]  record    string, see idempotency_begin                prefix:2:{idempotency:<part>}:<scope>:<key>:record
-- ARGV[1]  token     of the attempt
-- ARGV[2]  lease_ms  integer, 10 to 86400000
-- ARGV[3]  keep_ms   how long the record is kept after the lease
-- ARGV[4]  payload   24 bytes, the fingerprint of the body so far; a longer one in the record stays
--
-- Value    record: see idempotency_begin
-- Returns  1 renewed, also if the lease had ended without a new attempt; 0 the token lost the operation
-- Errors   WRONGTYPE
-- Repeat   harmless: a late call does not replace a longer fingerprint
local record, token, lease_ms, keep_ms, payload = KEYS[1], ARGV[1], ARGV[2] + 0, ARGV[3] + 0, ARGV[4]

local stored = redis.call('GET', record) or ''
if #stored < 80 or stored:byte(1) ~= 1 or stored:byte(2) ~= 1 or stored:sub(41, 56) ~= token then
  return 0
end
-- Renewals and checkpoints use different connections, so they may arrive out of order.
local kind, len = struct.unpack('<BI7', payload)
local known_kind, known_len = struct.unpack('<BI7', stored, 57)
if known_len > len or (known_len == len and known_kind > kind) then
  payload = stored:sub(57, 80)
end
local time = redis.call('TIME')
local ends = time[1] * 1000000 + time[2] + lease_ms * 1000
stored = stored:sub(1, 13) .. struct.pack('<I7I4', ends, lease_ms) .. stored:sub(25, 56) .. payload .. stored:sub(81)
-- On a full server the first write of a script must need no memory.
redis.pcall('PEXPIRE', record, lease_ms + keep_ms)
redis.call('SET', record, stored, 'PX', lease_ms + keep_ms)
return 1
