-- delay_queue_runs: runs of waiting jobs.

local signs = '0123456789ABCDEFGHJKMNPQRSTVWXYZ'

-- The ids of the jobs of a run.
local function jobs_of(run)
  local stem, from, found = run:sub(1, -2), signs:find(run:sub(-1), 1, true), {}
  for i = from, from + 15 do
    found[#found + 1] = stem .. signs:sub(i, i)
  end
  return found
end

-- Compares ids of one score by bytes, as a sorted set does. Lua's `<` uses the collation locale of the server.
local function is_before(one, other)
  for i = 1, math.min(#one, #other) do
    local byte, its = string.byte(one, i), string.byte(other, i)
    if byte ~= its then
      return byte < its
    end
  end
  return #one < #other
end
