local limit, length, cost = tonumber(ARGV[1]), tonumber(ARGV[3]), tonumber(ARGV[4])
local window = math.floor(now / length)
local key = KEYS[1] .. ':' .. window
local count = tonumber(redis.call('GET', key)) or 0
local allowed = 0
if count + cost <= limit then
  allowed = 1
  count = redis.call('INCRBY', key, cost)
  if count == cost then
    redis.call('EXPIRE', key, length + 1)
  end
end
return { allowed, limit - count, math.ceil((window + 1) * length - now) }
