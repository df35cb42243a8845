local limit, length, cost = tonumber(ARGV[1]), tonumber(ARGV[3]), tonumber(ARGV[4])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - length)
local count = redis.call('ZCARD', KEYS[1])
local allowed = 0
if count + cost <= limit then
  allowed = 1
  for number = 1, cost do
    redis.call('ZADD', KEYS[1], now, now .. ':' .. number .. ':' .. math.random())
  end
  redis.call('EXPIRE', KEYS[1], length + 1)
end
local oldest = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
return { allowed, limit - count - allowed * cost, math.ceil((oldest[2] or now) + length - now) }
