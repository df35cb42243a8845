-- ARGV[2]  now in microseconds, or nothing for the server's own time, which is read once
--
-- Numbers are integers below 2^53, exact in a double; redis.call writes them with 17 digits. Everything is computed before anything is
-- written: a script that fails has changed nothing.
local call, floor, ceil, max, min = redis.call, math.floor, math.ceil, math.max, math.min
-- The same instant as a text: formatting a number takes as long as a whole read.
local now_text = ARGV[2]
if not now_text then
  local time = call('TIME')
  now_text = time[1] .. string.sub('00000', #time[2]) .. time[2]
end
local now = now_text + 0
