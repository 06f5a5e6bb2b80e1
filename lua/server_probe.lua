-- server_probe: list the required commands that this Redis user may not run. Leaves nothing behind.
--
-- KEYS[1]  probe     a reserved key that never exists             prefix:2:{probe}
-- ARGV[1]  nothing   an empty string, so that no write would change the key
--
-- Value    none
-- Returns  the names of the forbidden commands, separated by spaces; empty if all are allowed
-- Errors   none of its own; NOPERM if the user may not run scripts or touch the key
-- Repeat   harmless
local probe, nothing = KEYS[1], ARGV[1]

-- Whether the command is forbidden, rather than refused because the server is out of memory or a replica.
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
-- APPEND creates the key. Redis before 7 has no acl_check_cmd, so run it there only if UNLINK is allowed.
local may_append = true
if redis.acl_check_cmd then
  may_append = redis.acl_check_cmd('APPEND', probe, nothing)
elseif not table.concat(missing):find('UNLINK', 1, true) then
  may_append = not is_forbidden(redis.pcall('APPEND', probe, nothing))
  redis.pcall('UNLINK', probe)
end
if not may_append then
  missing[#missing + 1] = 'APPEND'
end
return table.concat(missing, ' ')
