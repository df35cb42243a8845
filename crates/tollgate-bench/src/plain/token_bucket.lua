local size, rate, cost = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[4])
local state = redis.call('HMGET', KEYS[1], 'tokens', 'last_refill')
local tokens, dated = tonumber(state[1]), tonumber(state[2])
if tokens == nil then
  tokens, dated = size, now
end
tokens = math.min(size, tokens + (now - dated) * rate)
local allowed = 0
if tokens >= cost then
  tokens, allowed = tokens - cost, 1
  redis.call('HSET', KEYS[1], 'tokens', tokens, 'last_refill', now)
  redis.call('EXPIRE', KEYS[1], math.ceil(size / rate) + 1)
end
return { allowed, math.floor(tokens), math.ceil((size - tokens) / rate) }
