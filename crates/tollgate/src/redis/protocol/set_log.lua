local function log(numbers)
  local start_position = 3
  @log
  return admitted, reply, changed and save
end
local reply, save
fit, reply, save = log(numbers)
local format = string.rep('>i8', #reply)
fits[i], binding[i], replies[i] = fit, binds, struct.pack('>i8' .. format, #reply, unpack(reply))
groups = step(i + 1)
n = shares[i]
if groups and n < fit then
  -- Others deny: it is asked again for fewer, or keeps nothing.
  save = n > 0 and select(3, log(string.sub(numbers, 1, -17) .. struct.pack('>i8i8', n, 0)))
end
if groups and save then
  save()
end
return groups
