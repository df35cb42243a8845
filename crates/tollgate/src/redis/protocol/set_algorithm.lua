if kind == @kind then
  @read
  cost, wait, count = struct.unpack('>i8i8i8', numbers, position)
  @fit
  fit = max(0, min(count, fit))
  fits[i], binding[i], replies[i] = fit, binds, @reply
  groups = step(i + 1)
  if not groups then
    return
  end
  n = shares[i]
  local changed = n > 0
  @spend
  if changed then
    @write
  end
  return groups
end
