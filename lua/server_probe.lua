-- server_probe: which of the commands that everybody needs this user may not run. Changes nothing.
--
-- KEYS[1]  probe     a key of ours that is never there           prefix:2:{probe}
-- ARGV[1]  nothing   an empty text, so that nothing would be written to it even so
--
-- Value    none
-- Returns  the names of the commands, with spaces in between; none are missing if that is empty
-- Errors   none of its own; NOPERM where the user may not run scripts or touch the key
-- Repeat   harmless
local probe, nothing = KEYS[1], ARGV[1]

-- Whether it is forbidden, and not refused for another reason: the server may be out of memory, or a replica.
local function is_forbidden(answer)
  local problem = type(answer) == 'table' and answer.err or ''
  return problem:find("The user executing the script can't", 1, true) or problem:find('ACL failure in script', 1, true)
end

local missing = {}
for _, command in ipairs({
  { 'TIME' },
  { 'GET', probe },
  { 'MGET', probe },
  { 'GETRANGE', probe, 0, 0 },
  { 'STRLEN', probe },
  { 'PTTL', probe },
  { 'PEXPIRE', probe, 1 },
  { 'UNLINK', probe },
  { 'SETRANGE', probe, 0, nothing },
  { 'SET', probe, nothing, 'XX', 'PX', 1 },
}) do
  if is_forbidden(redis.pcall(unpack(command))) then
    missing[#missing + 1] = command[1]
  end
end
-- To run these would leave something behind, or is not for scripts. Redis before 7 cannot be asked.
if redis.acl_check_cmd then
  for _, command in ipairs({ { 'APPEND', probe, nothing }, { 'EVAL', nothing, 1, probe } }) do
    if not redis.acl_check_cmd(unpack(command)) then
      missing[#missing + 1] = command[1]
    end
  end
end
return table.concat(missing, ' ')
