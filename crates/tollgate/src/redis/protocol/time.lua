-- ARGV[1]  now in microseconds, or '' for the server's own time, which is read once
--
-- Numbers are integers below 2^53, exact in a double; redis.call writes them with 17 digits. Everything is computed before anything is
-- written: a script that fails has changed nothing.
local call, floor, ceil, max, min = redis.call, math.floor, math.ceil, math.max, math.min
local now
if ARGV[1] == '' then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
else
  now = tonumber(ARGV[1])
end
