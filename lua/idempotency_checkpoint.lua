-- idempotency_checkpoint: put down how far an attempt has come, and let its lease last its whole length from now on, if the
--                         operation is still the token's.
--
-- KEYS[1]  record      string, see idempotency_begin              prefix:2:{idempotency:<part>}:<scope>:<key>:record
-- ARGV[1]  token       of the attempt
-- ARGV[2]  lease_ms    integer, 10 to 86400000
-- ARGV[3]  keep_ms     how long the record is kept after the lease
-- ARGV[4]  payload     24 bytes, the fingerprint of the body as far as it is known; where the record knows more, that stays
-- ARGV[5]  checkpoint  bytes, see below
--
-- Value    record: see idempotency_begin; checkpoint: 4 bytes its number, little endian, 1 byte the length of the step, the step,
--          then what goes with it
-- Returns  1 put down, also where the lease had ended and nobody has begun anew, or one with a larger number is there; 0 not this
--          token's any more
-- Errors   WRONGTYPE
-- Repeat   harmless: one that comes late does not take the place of a later one, nor does it take back what is known of the body
local record, token, lease_ms, keep_ms, payload = KEYS[1], ARGV[1], ARGV[2] + 0, ARGV[3] + 0, ARGV[4]
local checkpoint = ARGV[5]

local stored = redis.call('GET', record) or ''
if #stored < 80 or stored:byte(1) ~= 1 or stored:byte(2) ~= 1 or stored:sub(41, 56) ~= token then
  return 0
end
if #stored > 84 and struct.unpack('<I4', stored, 81) > struct.unpack('<I4', checkpoint) then
  return 1
end
-- Renewals and checkpoints go ways of their own, so that one may come after another that was sent later.
local kind, len = struct.unpack('<BI7', payload)
local known_kind, known_len = struct.unpack('<BI7', stored, 57)
if known_len > len or (known_len == len and known_kind > kind) then
  payload = stored:sub(57, 80)
end
local time = redis.call('TIME')
local ends = time[1] * 1000000 + time[2] + lease_ms * 1000
stored = stored:sub(1, 13) .. struct.pack('<I7I4', ends, lease_ms) .. stored:sub(25, 56) .. payload .. checkpoint
redis.call('SET', record, stored, 'PX', lease_ms + keep_ms)
return 1
