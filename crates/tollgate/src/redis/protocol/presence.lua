-- Who is there: a node says that it lives, and hears how many do.
--
-- KEYS[1]  sorted set: nodes, by when they were last heard of, in microseconds
-- ARGV[1]  now in microseconds, or '' for the server's own time
-- ARGV[2]  the node
-- ARGV[3]  for how long a node counts after it was heard of, in microseconds
--
-- Returns how many nodes count now.
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
redis.call('ZADD', KEYS[1], now, ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[3])
-- Whoever spoke before the clock was set back, and does not any more.
redis.call('ZREMRANGEBYSCORE', KEYS[1], now + ARGV[3], '+inf')
redis.call('PEXPIRE', KEYS[1], math.ceil(ARGV[3] / 1000))
return redis.call('ZCARD', KEYS[1])
