-- One log.
@time
local key, numbers, start_position = KEYS[1], ARGV[3], 1
@log
if changed then
  save()
end
return struct.pack('>i8i8', admitted, now) .. struct.pack(string.rep('>i8', #reply), unpack(reply))
