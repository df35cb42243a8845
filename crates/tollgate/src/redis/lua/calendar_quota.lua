-- A quota of the calendar: the twin of calendar_quota.rs, number for number.
--
-- KEYS[1]  the state of one key: a hash with
--            end     when the period ends, in microseconds
--            count   permits taken in it, under whichever limit
-- ARGV[3]  of the limit: limit in permits, no period is longer in microseconds, and six instants, one after another, at which periods begin:
--          two before the one that the server's clock was last seen in, and two after it
--
-- Returns { how many were admitted, now, end, count }, the fields as they were before.
local op = ARGV[2]
local limit, horizon, position = struct.unpack('>i8i8', ARGV[3])
local bounds = { struct.unpack('>i8i8i8i8i8i8', ARGV[3], position) }
position = bounds[7]

-- The end of the period that an instant is in, if the node has told of it.
local function end_of(instant)
  for number = 1, 5 do
    if bounds[number] <= instant and instant < bounds[number + 1] then
      return bounds[number + 1]
    end
  end
end

local current = end_of(now)
if not current then
  -- The clock was set: the caller repeats the call with the periods around this time.
  error(string.format('TOLLGATE time %.0f', now))
end
local stored = call('HMGET', KEYS[1], 'end', 'count')
local finish, taken, redated = 0, 0, false
if stored[1] or stored[2] then
  -- Bounds hold what was not written by us.
  finish, taken = whole(stored[1]), max(0, min(whole(stored[2]), 6755399441055744))
end
if finish - now > 2 * horizon then
  finish, taken, redated = current, max(taken, limit), true
end
if now >= finish and current > finish then
  finish, taken = current, 0
end
if ARGV[6] and end_of(struct.unpack('>i8', ARGV[6])) == finish then
  -- The period in which the server took over has nothing left.
  taken = max(taken, limit)
end

local admitted, changed = 0, false
if op == 'ask' then
  while position <= #ARGV[3] do
    local cost, _, count
    cost, _, count, position = struct.unpack('>i8i8i8', ARGV[3], position)
    local fit = max(0, min(count, floor((limit - taken) / cost)))
    changed = changed or redated and count > 0 or fit > 0
    taken, admitted = taken + fit * cost, admitted + fit
  end
elseif op == 'refund' then
  local cost, start = struct.unpack('>i8i8', ARGV[3], position)
  if taken > 0 and cost > 0 and end_of(start) == finish then
    taken, changed = max(taken - min(cost, limit), 0), true
  end
elseif op == 'charge' then
  local cost = struct.unpack('>i8', ARGV[3], position)
  if cost > 0 then
    taken, changed = max(taken, min(taken + min(cost, 2 * limit), 2 * limit)), true
  end
end

if changed then
  call('HSET', KEYS[1], 'end', finish, 'count', taken)
  expire(KEYS[1], finish)
end
return packed({ admitted, now, stored[1], stored[2] })
