-- SLIDING_WINDOW_COUNTER: the twin of sliding_counter.rs.
--
-- A hash with
--   seen  the latest time that this counter has seen, in microseconds
--   tail  the latest start of a reservation, in microseconds
--   sub   the length of its sub-buckets in microseconds
--   N     permits in sub-bucket number N since the epoch
--   limit the limit that it was written under: limit/window/sub-buckets; a suffix marks a state that is not plain
-- Numbers of the limit: limit in permits, sub-buckets in a window, their length in microseconds, the tick in microseconds in which the
-- weight of the oldest sub-bucket falls (0: it counts in full), 1 if denied requests count.
-- @read
local limit, buckets, length, tick, counts_denied, since
own, limit, buckets, length, tick, counts_denied, since, cost, wait, count, parts, position =
  struct.unpack('>I4c0dddddddddd', numbers, position)
local index = (now - now % length) / length
local stored
if buckets == 1 then
  stored = call('HMGET', key, 'tail', 'limit', index - 1, index)
else
  local names = {}
  for number = index - buckets, index do
    names[#names + 1] = number
  end
  stored = call('HMGET', key, 'tail', 'limit', unpack(names))
end
-- Of the stored fields, those of the oldest sub-bucket and of the current one.
local oldest, current = 3, 3 + buckets
if stored[2] == own then
  -- The tail is never before the time that was seen: either may be ahead only if requests wait, or if the clock was set back.
  local tail = stored[1] + 0
  if not (tail >= 0 and tail <= now) then
    @rare
  end
elseif stored[1] or stored[2] then
  @rare
end
local inside, leaving = 0, (stored[oldest] or 0) + 0
for number = oldest + 1, current do
  inside = inside + (stored[number] or 0)
end
if not (inside >= 0 and inside <= 6755399441055744 and leaving >= 0 and leaving <= 6755399441055744) then
  @rare
end
if since > 0 then
  -- The sub-bucket in which the server took over counts as much as the limit.
  local number = floor(since / length) - index + current
  if number >= oldest and (stored[number] or 0) - limit < 0 then
    @rare
  end
end
-- Permits that count now, rounded up.
local used = inside + leaving
if tick > 0 then
  local ticks = length / tick
  local left = ticks - floor(now % length / tick)
  -- A count under a larger limit may be too large for an exact product. Any result above the limit denies alike.
  used = inside + (leaving > floor(limit * ticks / left) and limit + 1 or ceil(leaving * left / ticks))
end
local taken, found = 0, struct.pack('>ddd', now, leaving, stored[oldest + 1] or 0)
for number = oldest + 2, current do
  found = found .. struct.pack('>d', stored[number] or 0)
end
-- @reply
found
-- @fit
fit = floor((limit - used - taken) / cost)
if fit < count and wait > 0 then
  @rare
end
-- @spend
taken = taken + n * cost
if fit < count and counts_denied == 1 and used + taken < limit then
  taken, changed = taken + min(cost, limit - used - taken), true
end
-- @refund
local number = floor(wait / length) - index + current
if wait > now then
  @rare
end
if number == current then
  local credit = min(cost, (stored[current] or 0) + taken)
  taken, changed = taken - credit, changed or credit > 0
elseif number >= oldest and number < current and cost > 0 and (stored[number] or 0) - 0 > 0 then
  stored[number] = stored[number] - min(cost, stored[number])
  call('HSET', key, 'seen', now_text, 'tail', now_text, index - current + number, stored[number])
end
-- @write
local counted = (stored[current] or 0) + taken
if stored[current] then
  -- In the same sub-bucket the key expires at the same time.
  call('HSET', key, 'seen', now_text, 'tail', now_text, index, counted)
else
  -- Removes sub-buckets that no longer count. Reservations may have left older ones.
  local gone = {}
  if stored[1] then
    local last = floor(stored[1] / length)
    for number = last - 2 * buckets - 1, min(last, index - buckets - 1) do
      gone[#gone + 1] = number
    end
  end
  call('HSET', key, 'seen', now_text, 'tail', now_text, 'sub', length, 'limit', own, index, counted)
  if gone[1] then
    call('HDEL', key, unpack(gone))
  end
  @expire((index + buckets + 1) * length)
end
