-- Changes what all nodes go by, a policy or tiers, if that is still what the caller has read.
--
-- KEYS[1]  hash with number and epoch of its last change
-- KEYS[2]  optional: a hash that gets the changes and then takes the place of KEYS[1]
-- ARGV[1]  the number that was read, 0 for none
-- ARGV[2]  the epoch that was read, '' for none
-- ARGV[3]  milliseconds to live, or '' for no end
-- ARGV[4]  how many of the following are fields by turns with their values; the rest are fields to remove
--
-- Returns 1, or 0 if it was changed meanwhile: then nothing is written.
local call = redis.call
local stored = call('HMGET', KEYS[1], 'number', 'epoch')
if (stored[1] or '0') ~= ARGV[1] or (stored[2] or '') ~= ARGV[2] then
  return 0
end
local key, last = KEYS[2] or KEYS[1], 4 + ARGV[4]
call('HSET', key, unpack(ARGV, 5, last))
if #ARGV > last then
  call('HDEL', key, unpack(ARGV, last + 1))
end
if ARGV[3] ~= '' then
  call('PEXPIRE', key, ARGV[3])
end
if KEYS[2] then
  call('PERSIST', key)
  call('RENAME', key, KEYS[1])
end
return 1
