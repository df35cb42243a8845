-- Behind full_log_decide.lua: writes the entries that are new or changed, and removes some that have expired.

-- How many of the first members can be removed when permits up to `gone` are gone, and whether the log must say so.
local function removable(gone)
  local left, sum, cost = apart(newest_sum, gone), first_sum, first_cost
  if apart(newest_sum, sum) < left then
    return 0, apart(newest_sum, sum) + cost > left
  elseif gone == sum and not is_marked then
    -- The usual case: one comes, one goes.
    return 1, false
  end
  local function is_kept(rank)
    local start_at, sum_at, cost_at = entry(rank)
    local kept = not start_at or apart(newest_sum, sum_at) < left
    if start_at and kept then
      sum, cost = sum_at, cost_at
    end
    return kept
  end
  -- Mostly it is one of the first: the steps double.
  local low, top = 1, 1
  while top <= TRIM_MAX and not is_kept(top) do
    low, top = top + 1, top * 2
  end
  local many = bisect(low, min(top - 1, TRIM_MAX), is_kept)
  return min(many, TRIM_MAX), many > TRIM_MAX or apart(newest_sum, sum) + cost > left
end

local function save()
  local gone, many, must_say = apart(last.sum, held), 0, false
  if not fresh then
    many, must_say = removable(gone)
  elseif newest then
    call('UNLINK', key)
  end
  -- Additions go first: they are what a server without memory refuses.
  for _, it in ipairs(entries) do
    if fresh or it.changed then
      local member = string.format(MEMBER, it.sum, it.cost, it.start - time)
      call('ZADD', key, it.start, member)
      if not fresh and it.member and it.member ~= member then
        call('ZREM', key, it.member)
      end
    end
  end
  if popped and not fresh then
    call('ZREM', key, popped)
  end
  if many > 0 then
    call('ZREMRANGEBYRANK', key, 0, many - 1)
  end
  if must_say then
    call('ZADD', key, '-inf', string.format(MEMBER, gone, 0, 0))
  end
  call('PEXPIRE', key, ceil(max(0, last.start + retention - now) / 1000) + 1000)
end
