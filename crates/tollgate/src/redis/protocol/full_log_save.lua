-- Follows full_log_decide.lua: writes the entries that are new or changed, and removes some that have expired.

-- How many of the first members can be removed when permits up to `gone` are gone, and whether the log must say so.
local function removable(gone)
  local left, members = apart(newest_sum, gone), call('ZRANGE', key, 0, TRIM_MAX)
  for number, member in ipairs(members) do
    local sum, cost = string.match(member, '^(%d+):(%d+):')
    if apart(newest_sum, sum) < left then
      return number - 1, apart(newest_sum, sum) + cost > left
    end
  end
  return min(#members, TRIM_MAX), true
end

local function save()
  local gone, many, must_say = apart(last.sum, held), 0, false
  if not fresh then
    many, must_say = removable(gone)
  elseif newest then
    call('UNLINK', key)
  end
  -- Additions go first, because a server without memory refuses them.
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
