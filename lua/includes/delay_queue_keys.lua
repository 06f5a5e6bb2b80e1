-- delay_queue_keys: the keys of a queue, what they hold, and the state of the queue.
--
-- KEYS[1]  jobs     hash of records by id, expires keep_ms after the last job is due    prefix:2:{delay_queue:<name>}:jobs
-- KEYS[2]  high     sorted set of ids by when they are due in ms                        prefix:2:{delay_queue:<name>}:due:high
-- KEYS[3]  normal   likewise                                                            prefix:2:{delay_queue:<name>}:due:normal
-- KEYS[4]  low      likewise                                                            prefix:2:{delay_queue:<name>}:due:low
-- KEYS[5]  leases   sorted set of tickets by when they end in ms                        prefix:2:{delay_queue:<name>}:leases
-- KEYS[6]  dead     sorted set of ids by when they died in ms                           prefix:2:{delay_queue:<name>}:dead
-- KEYS[7]  unique   hash of holders by unique key                                       prefix:2:{delay_queue:<name>}:unique
-- KEYS[8]  cancels  hash of cancelled jobs that still run                               prefix:2:{delay_queue:<name>}:cancels
-- KEYS[9]  state    string, expires in 10 minutes unless the queue is paused            prefix:2:{delay_queue:<name>}:state
-- KEYS[10] idle     sorted set of waiting workers by their last call in ms              prefix:2:{delay_queue:<name>}:idle
-- KEYS[11] runs     sorted set of runs by when they are due in ms                       prefix:2:{delay_queue:<name>}:runs
-- KEYS[12] snoozed  sorted set of ids by when they return to their due set in ms        prefix:2:{delay_queue:<name>}:snoozed
-- ARGV[1]  keep_ms   how long keys outlive their last entry, at most 2^40
-- ARGV[2]  publish   PUBLISH, or SPUBLISH on a cluster
-- ARGV[3]  wake      prefix of the channels of workers
--
-- Value    jobs: 1 byte version 1, 6 bytes push time and 6 bytes due time in ms. 1 byte priority (0 to 2) plus 4 times the uniqueness: 0
--          none, 1 while the job exists, 2 while it waits, 3 timed, 7 timed even if cancelled. 2 bytes attempts allowed, 2 bytes
--          attempts used. 1 byte last failure: 0 none, 1 failed, 2 lease expired, 3 refused, 4 undecodable. 2 bytes length of the error,
--          1 byte of the unique key, 4 bytes of the headers, big endian. Then unique key, error, headers and payload. If timed, the headers
--          begin with 6 bytes, the duration of the hold in ms.
--          unique: 6 bytes end in ms, 0 while the job exists; then the id.
--          runs: the first id of 16 waiting jobs of normal priority and one due time, whose ids differ only in the last character: 0 to
--          F, or G to Z without I, L, O and U. They are in no due set.
--          leases: a ticket is 7 bytes token, big endian, and the id.
--          state: 1 byte version 1, 1 byte whether paused (1 or 0), 7 bytes last token, 6 bytes when the timekeeper looks again in ms,
--          little endian;
--          then the timekeeper, which is the worker that waits for the next due time.
--          cancels: byte 0 and the id of a cancelled job, to its record; byte 1 and its unique key, to its id. A job with that id or key
--          is not claimed before the cancelled run has ended
-- Errors   TOLLGATE if the state was not written by these scripts; WRONGTYPE
local jobs, high, normal, low, leases, dead = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local unique, cancels, state, idle, runs, snoozed = KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[12]
local keep_ms, publish, wake = ARGV[1] + 0, ARGV[2], ARGV[3]
local due = {[0] = high, normal, low}

local stored = redis.call('GET', state) or '\1\0\0\0\0\0\0\0\0\0\0\0\0\0\0'
if #stored < 15 or stored:byte(1) ~= 1 then
  return redis.error_reply('TOLLGATE the value does not hold the state of a queue of version 1')
end
local is_paused, token, wakes_at = struct.unpack('<BI7I6', stored, 2)
local keeper = stored:sub(16)
