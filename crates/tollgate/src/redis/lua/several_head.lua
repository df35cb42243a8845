-- Before the scripts of single limits, where several are asked: what they read is read at once, what they write waits in `writes`.
local writes
local READS = { HMGET = 1, HGETALL = 1, ZRANGE = 1, ZRANGEBYSCORE = 1, ZCARD = 1, ZCOUNT = 1 }
call = function(name, ...)
  if READS[name] then
    return redis.call(name, ...)
  end
  writes[#writes + 1] = { name, ... }
end
packed = function(answer)
  return answer
end
