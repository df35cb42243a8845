-- A quota of the calendar: the twin of calendar_quota.rs.
--
-- A hash with
--   end    when the period ends, in microseconds
--   count  permits taken in it, under any limit
-- Numbers of the limit: limit in permits; no period is longer, in microseconds; six instants, one after another, at which periods begin: two
-- before the period that the server's clock was last seen in, and two after it.
-- @read
local limit, horizon, since, bounds
own, limit, horizon, position = struct.unpack('>I4c0dd', numbers, position)
bounds = { struct.unpack('>dddddd', numbers, position) }
since, cost, wait, count, parts, position = struct.unpack('>ddddd', numbers, bounds[7])
local current, doubted
for number = 1, 5 do
  if bounds[number] <= now and now < bounds[number + 1] then
    current = bounds[number + 1]
  end
  if bounds[number] <= since and since < bounds[number + 1] then
    doubted = bounds[number + 1]
  end
end
if not current then
  -- The clock was set: the caller repeats the call with the periods around this time.
  error(string.format('TOLLGATE time %.0f', now))
end
local finish, taken = 0, 0
local stored = call('HMGET', key, 'end', 'count')
if stored[1] or stored[2] then
  -- One field alone is not a state.
  finish, taken = (stored[1] or math.huge) + 0, (stored[2] or -1) + 0
  if not (finish - now <= 2 * horizon and taken >= 0 and taken <= 6755399441055744) then
    @rare
  end
end
if now >= finish and current > finish then
  finish, taken = current, 0
end
if finish == doubted and taken < limit then
  @rare
end
-- @reply
struct.pack('>dd', finish, taken)
-- @fit
fit = floor((limit - taken) / cost)
-- @spend
taken = taken + n * cost
-- @refund
if wait < bounds[1] or wait >= bounds[6] then
  @rare
end
for number = 1, 5 do
  local is_period = bounds[number] <= wait and wait < bounds[number + 1] and bounds[number + 1] == finish
  if is_period and cost > 0 and taken > 0 then
    taken, changed = max(0, taken - cost), true
  end
end
-- @write
call('HSET', key, 'end', finish, 'count', taken)
@expire(finish)
