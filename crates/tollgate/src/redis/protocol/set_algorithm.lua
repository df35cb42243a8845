if kind == @kind then
  @read
  @fit
  if fit > count then
    fit = count
  elseif fit < 0 then
    fit = 0
  end
  local before = @reply
  reply = step(i + 1, group, binds == 1 and fit < most and fit or most)
  if not reply then
    return
  end
  reply = before .. reply
  n = granted[group] < fit and granted[group] or fit
  local changed = n > 0
  @spend
  if changed then
    @write
  end
  return reply
end
