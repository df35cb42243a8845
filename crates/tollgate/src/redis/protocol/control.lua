-- Changes data shared by all nodes, a policy or tiers, if it is still the version that the caller has read.
--
-- KEYS[1]  hash with number and epoch of its last change
-- KEYS[2]  optional: another such hash, which gets the changes and then replaces KEYS[1]
-- ARGV[1]  milliseconds to live, or '' for no end
-- ARGV[2]  how many of the following are fields by turns with their values; then come fields to remove, and at last, for each key, the number
--          (0 for none) and the epoch ('' for none) that were read
--
-- Returns 1, or 0 if one of the hashes was changed meanwhile: then nothing is written.
local call, key, last, versions = redis.call, KEYS[#KEYS], 2 + ARGV[2], #ARGV - 2 * #KEYS
for number = 1, #KEYS do
  local stored, read = call('HMGET', KEYS[number], 'number', 'epoch'), versions + 2 * number
  if (stored[1] or '0') ~= ARGV[read - 1] or (stored[2] or '') ~= ARGV[read] then
    return 0
  end
end
call('HSET', key, unpack(ARGV, 3, last))
if versions > last then
  call('HDEL', key, unpack(ARGV, last + 1, versions))
end
if ARGV[1] ~= '' then
  call('PEXPIRE', key, ARGV[1])
end
if KEYS[2] then
  call('PERSIST', key)
  call('RENAME', key, KEYS[1])
end
return 1
