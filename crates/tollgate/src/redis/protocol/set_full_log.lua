own, position = struct.unpack('>I4c0', numbers, position)
local limit_numbers = struct.pack('>I4', 0) .. string.sub(numbers, position, position + 63)
cost, wait, count, parts, position = struct.unpack('>dddd', numbers, position + 64)
local now = now
if own ~= '' then
  -- Beside computed states: their time, and the value of rare.lua for the log then, which must be unchanged.
  now, position = struct.unpack('>d', numbers, position)
  if cmsgpack.pack({ call('ZRANGE', key, 0, 0)[1], call('ZRANGE', key, -1, -1)[1] }) ~= own then
    return
  end
end
local function log(many)
  local numbers = limit_numbers .. struct.pack('>dddd', cost, wait, many, 0)
  local position = 1
  @log
  return admitted, reply, changed and save
end
local found, save
fit, found, save = log(count)
reply = step(i + 1, group, binds == 1 and fit < most and fit or most)
if not reply then
  return
end
if granted[group] < fit then
  -- Other limits deny: it is asked again for fewer sets, or writes nothing.
  save = granted[group] > 0 and select(3, log(granted[group]))
end
if save then
  save()
end
return struct.pack('>d' .. string.rep('>d', #found), #found, unpack(found)) .. reply
