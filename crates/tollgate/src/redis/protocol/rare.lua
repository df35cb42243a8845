-- For the caller to compute with: the fields of all states that are hashes.
local snapshots = {}
for number = 1, #KEYS do
  local fields = redis.pcall('HGETALL', KEYS[number])
  snapshots[number] = fields.err and '' or cmsgpack.pack(fields)
end
return struct.pack('>i8i8', -1, now) .. cmsgpack.pack(snapshots)
