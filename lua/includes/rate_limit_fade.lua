-- rate_limit_fade: what the previous window of a sliding window still counts for.

-- previous * left / steps, rounded up, divided first, so that no product reaches 2^53.
local function faded(previous, left, steps)
  local over = previous % steps
  return (previous - over) / steps * left + math.ceil(over * left / steps)
end
