-- One log.
@time
local key, numbers, own, position = KEYS[1], ARGV[1], nil, 1
@log
if changed then
  save()
end
return struct.pack('>ddd', admitted, now, #reply) .. struct.pack(string.rep('>d', #reply), unpack(reply))
