-- SLIDING_WINDOW in a stream, as far as measuring needs it: asks without waits, each at a time of its own. Arguments and answer
-- are those of sliding_log.lua.
--
-- KEYS[1]  the state of one key: a stream with one entry for each admission
--            id      the start in microseconds (where streams mostly have milliseconds)
--            fields  s, the running sum of all costs; c, the cost; l, how far ahead of its decision it starts
local limit, length, _, _, _, _, _, _, permits = struct.unpack('>i8i8i8i8i8i8i8i8i8', ARGV[3])
local key = KEYS[1]

-- Start, sum, cost and lead of the first of some entries.
local function read(entries)
  local entry = entries[1]
  if entry then
    local fields = entry[2]
    return whole(string.match(entry[1], '^%d+')), whole(fields[2]), whole(fields[4]), whole(fields[6])
  end
end
local function from(start)
  return read(call('XRANGE', key, string.format('%.0f', start), '+', 'COUNT', 1))
end

local time, used, base, oldest, oldest_cost = now, 0, 0, -1, 0
local last, last_sum, _, lead = read(call('XREVRANGE', key, '+', '-', 'COUNT', 1))
if last then
  time, base = max(now, last - lead), last_sum
  local first, first_sum, first_cost = from(time - length + 1)
  if first then
    base, oldest, oldest_cost = first_sum - first_cost, first, first_cost
    used = last_sum - base
  end
end
local reply = { 0, now, time, used, oldest, max(time, last or 0), 1, 1 }

local over = used + permits - limit
if over <= 0 then
  reply[1], reply[9] = 1, time
  -- Trims whole nodes of the stream only: entries one by one would take longer and free nothing earlier.
  call('XADD', key, 'MINID', '~', string.format('%.0f', time - length + 1), string.format('%.0f-0', time),
    's', (last_sum or 0) + permits, 'c', permits, 'l', 0)
  expire(key, time + length)
else
  -- A stream knows no ranks, so the search is among times. The oldest entry is known, and mostly enough.
  local low, high = oldest, oldest_cost >= over and oldest or last
  while low < high do
    local middle = floor((low + high) / 2)
    local start, sum = from(middle)
    if sum - base >= over then
      high = middle
    else
      low = start + 1
    end
  end
  reply[9] = max(reply[6], from(low) + length)
end
return reply
