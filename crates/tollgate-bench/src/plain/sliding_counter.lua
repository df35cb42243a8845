local limit, length, cost = tonumber(ARGV[1]), tonumber(ARGV[3]), tonumber(ARGV[4])
local window = math.floor(now / length)
local key = KEYS[1] .. ':' .. window
local before = tonumber(redis.call('GET', KEYS[1] .. ':' .. (window - 1))) or 0
local count = tonumber(redis.call('GET', key)) or 0
local used = before * (1 - (now % length) / length) + count
local allowed = 0
if used + cost <= limit then
  allowed, used = 1, used + cost
  redis.call('INCRBY', key, cost)
  redis.call('EXPIRE', key, 2 * length + 1)
end
return { allowed, math.floor(limit - used), math.ceil((window + 1) * length - now) }
