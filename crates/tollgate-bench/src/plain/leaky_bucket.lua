local size, rate, cost = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[4])
local state = redis.call('HMGET', KEYS[1], 'level', 'last_leak')
local level, dated = tonumber(state[1]), tonumber(state[2])
if level == nil then
  level, dated = 0, now
end
level = math.max(0, level - (now - dated) * rate)
local allowed = 0
if level + cost <= size then
  level, allowed = level + cost, 1
  redis.call('HSET', KEYS[1], 'level', level, 'last_leak', now)
  redis.call('EXPIRE', KEYS[1], math.ceil(size / rate) + 1)
end
return { allowed, math.floor(size - level), math.ceil(level / rate) }
