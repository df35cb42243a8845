-- SLIDING_WINDOW, the exact log: the twin of sliding_log.rs, number for number.
--
-- KEYS[1]  the state of one key: a sorted set with one member for each start at which requests were admitted
--            score   the start in microseconds
--            member  SUM:COST:LEAD, where SUM is the running sum of all costs, with 16 digits so that it also sorts; COST is of
--                    this start; and start - LEAD, of the newest, is the latest time that this log has seen
-- log.lua has the rest: what is asked, what is answered.
local op = ARGV[2]
local limit, length, retention, count_denied, position = struct.unpack('>i8i8i8i8', ARGV[3])
local key = KEYS[1]

-- What a member says: sum, cost, lead.
local function parts(member)
  local sum, cost, lead = string.match(member, '^(%d+):(%d+):(-?%d+)$')
  return whole(sum), whole(cost), whole(lead)
end

-- `last` is the newest entry, `touched` are entries to write (in place of what was `stored` of them), `gone` are members to
-- remove, `wipe` stands for all of them.
local last, touched, gone, wipe = nil, {}, {}, false
-- The time that counts as now: never before what this log has seen. Permits that count, and the sum before the first.
local time, used, base, oldest = now, 0, 0, -1
local newest = call('ZRANGE', key, -1, -1, 'WITHSCORES')
-- Entries up to here are not kept.
local gone_by
if newest[1] then
  local sum, cost, lead = parts(newest[1])
  last = { start = whole(newest[2]), sum = sum, cost = cost, stored = newest[1] }
  local seen = last.start - lead
  time, base = max(now, seen), sum
  gone_by = string.format('%.0f', time - retention)
  local function first_after(instant)
    return call('ZRANGEBYSCORE', key, '(' .. instant, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  end
  local first = first_after(string.format('%.0f', time - length))
  if first[1] then
    local first_sum, first_cost = parts(first[1])
    base = first_sum - first_cost
    used = sum - base
    oldest = first_cost > 0 and whole(first[2]) or -1
  end
  -- A clock that was set back by more than a window: all that is kept is one entry, of now.
  if seen - now > length then
    local first_kept = first_after(gone_by)
    if first_kept[1] then
      local first_sum, first_cost = parts(first_kept[1])
      used = sum - (first_sum - first_cost)
    end
    time, wipe, base, oldest = now, true, 0, used > 0 and now or -1
    last = { start = now, sum = used, cost = used }
    touched[1] = last
  end
end
local earliest = last and max(time, last.start) or time

-- One start is one entry, and a log without permits has kept only the time: the new entry takes it in.
local function add(start, permits)
  used, earliest = used + permits, start
  local sum = (last and last.sum or 0) + permits
  if last and (last.start == start or last.cost == 0) then
    last.start, last.sum, last.cost = start, sum, last.cost + permits
    if touched[#touched] ~= last then
      touched[#touched + 1] = last
    end
  else
    last = { start = start, sum = sum, cost = permits }
    touched[#touched + 1] = last
  end
end

-- The earliest start at which `permits` more fit: when enough of the oldest entries have left.
local function start_of(permits)
  local over = used + permits - limit
  if over <= 0 then
    return earliest
  end
  local target, found = base + over, nil
  local low, high = 0, wipe and -1 or call('ZCARD', key) - 1
  while low <= high do
    local middle = floor((low + high) / 2)
    local entry = call('ZRANGE', key, middle, middle, 'WITHSCORES')
    if parts(entry[1]) >= target then
      found, high = whole(entry[2]), middle - 1
    else
      low = middle + 1
    end
  end
  for index = 1, found and 0 or #touched do
    if touched[index].sum >= target then
      found = touched[index].start
      break
    end
  end
  return max(earliest, found + length)
end

-- Gives back permits of the grant that was to start at `at`.
local function give_back(permits, at)
  if last.start == at then
    local less = min(permits, last.cost)
    last.sum, last.cost = last.sum - less, last.cost - less
    if last.cost == 0 and not wipe and call('ZCOUNT', key, '(' .. gone_by, '+inf') > 1 then
      gone[1] = last.stored
      local before = call('ZRANGE', key, -2, -2, 'WITHSCORES')
      local sum, cost = parts(before[1])
      last = { start = whole(before[2]), sum = sum, cost = cost, stored = before[1] }
    end
  else
    -- The younger entries stay, so no more comes free than the true history would free.
    local rank = wipe and 0 or call('ZCOUNT', key, '-inf', gone_by)
    while permits > 0 do
      local entry = last
      if not wipe then
        local first = call('ZRANGE', key, rank, rank, 'WITHSCORES')
        if first[1] ~= last.stored then
          local sum, cost = parts(first[1])
          entry = { start = whole(first[2]), sum = sum, cost = cost, stored = first[1] }
        end
      end
      local less = min(permits, entry.cost)
      entry.cost, permits, rank = entry.cost - less, permits - less, rank + 1
      if entry == last then
        break
      elseif entry.cost == 0 then
        gone[#gone + 1] = entry.stored
      else
        touched[#touched + 1] = entry
      end
    end
  end
  touched[#touched + 1] = last
end

local function save()
  if wipe then
    call('DEL', key)
  end
  -- Additions go first: they are what a server without memory refuses.
  for _, entry in ipairs(touched) do
    local new = string.format('%016.0f:%.0f:%.0f', entry.sum, entry.cost, entry.start - time)
    call('ZADD', key, entry.start, new)
    if entry.stored and entry.stored ~= new then
      call('ZREM', key, entry.stored)
    end
  end
  for _, old in ipairs(gone) do
    call('ZREM', key, old)
  end
  if gone_by and not wipe then
    call('ZREMRANGEBYSCORE', key, '-inf', gone_by)
  end
end
