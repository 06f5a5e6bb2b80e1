-- rate_limit_refill: the refill of a token bucket.

-- The debt of a bucket after a refill: whole and parts. The debt is below 0 if more was refilled than was missing.
local function refilled(debt, part, passed, step, parts)
  if parts == 1 then
    return debt - passed * step, 0
  end
  -- passed * step / parts, with no product above 2^53 unless it is above the debt.
  local rest = passed % parts * step
  local refill = rest % parts
  debt, part = debt - (passed - passed % parts) / parts * step - (rest - refill) / parts, part - refill
  if part < 0 then
    return debt - 1, part + parts
  end
  return debt, part
end
