-- Returns the data from which the caller computes: the fields of hashes, and of logs a value that changes with every write.
local snapshots = {}
for number = 1, #KEYS do
  local key = KEYS[number]
  local fields = redis.pcall('HGETALL', key)
  if fields.err then
    fields = { call('ZRANGE', key, 0, 0)[1], call('ZRANGE', key, -1, -1)[1] }
  end
  snapshots[number] = cmsgpack.pack(fields)
end
return struct.pack('>dd', -1, now) .. cmsgpack.pack(snapshots)
