-- What every way of keeping a log does. Before this stands the text that reads and writes one:
--   stored, seen                    the newest entry (start, sum, cost), and the latest time that this log has seen
--   newest_sum                      the sum of the newest entry, as it was found
--   entry, newest_rank, rank_after, first_after, permits_from    what is known of the other entries
--   pop, save                       what is done to them; nothing is written before `save`
--
-- Returns { how many were admitted, now, the time that counts as now, permits that count, the oldest start that counts (-1:
-- none), the earliest start that keeps the order }, all as they were before, and then for each run: how many groups, and
-- for each group how many asks and their start.

-- The time that counts as now: never before what this log has seen. Permits that count; permits of all entries that are kept, which may
-- be older, for a longer window.
local time, used, held, oldest = now, 0, 0, -1
local oldest_cost
-- The newest of the stored entries and those that come behind it. If it is `fresh`, all others are gone.
local entries, fresh, redated = {}, true, false
if stored then
  local start
  time = max(now, seen)
  used, start, oldest_cost = first_after(time - length)
  held = used
  if retention > length then
    held = first_after(time - retention)
    local rank = rank_after(time - length) - retained
    if rank > 0 then
      held = min(held, permits_from(rank))
    end
  end
  fresh, oldest = held == 0, used > 0 and start or -1
  entries[1] = fresh and { start = stored.start, sum = 0, cost = 0 } or stored
  -- A clock that was set back by more than a window: all that is kept is one entry, of now.
  if seen - now > length then
    time, used, fresh, redated, oldest = now, held, true, true, held > 0 and now or -1
    entries[1] = { start = now, sum = held, cost = held }
  end
end
local last = entries[1]
local earliest = last and max(time, last.start) or time
-- Permits that count of the entries that are not in `entries`, and of the newest as it was found.
local used_before = fresh and 0 or used

-- One start is one entry, and a log without permits has kept only the time: the new entry takes it in.
local function add(start, permits)
  if last and (last.start == start or last.cost == 0) then
    last.start, last.sum, last.cost = start, plus(last.sum, permits), last.cost + permits
  else
    last = { start = start, sum = plus(last and last.sum or 0, permits), cost = permits }
    entries[#entries + 1] = last
  end
  last.changed = true
  used, held, earliest = used + permits, held + permits, start
end

-- The start of the stored entry with which `over` of the permits that count have left.
local function leaving(over)
  if over <= oldest_cost then
    return oldest
  end
  local low, starts = rank_after(time - length), {}
  local function is_enough(rank)
    local start, sum = entry(rank)
    starts[rank] = start
    return not sum or apart(newest_sum, sum) <= used_before - over
  end
  -- Where every entry has one permit, it is just so far.
  local guess = low + over - 1
  if not is_enough(guess) then
    guess = bisect(guess + 1, newest_rank(), is_enough)
  elseif guess > low and is_enough(guess - 1) then
    guess = bisect(low, guess - 2, is_enough)
  end
  return starts[guess]
end

-- The earliest start at which `permits` more fit: when enough of the oldest entries have left.
local function start_of(permits)
  local over = used + permits - limit
  if over <= 0 then
    return earliest
  end
  if over <= used_before then
    return max(earliest, leaving(over) + length)
  end
  for _, it in ipairs(entries) do
    if apart(last.sum, it.sum) <= used - over then
      return max(earliest, it.start + length)
    end
  end
end

-- Gives back permits of the grant that was to start at `at`.
local function give_back(permits, at)
  if last.start == at then
    local less = min(permits, last.cost)
    last.sum, last.cost, held = apart(last.sum, less), last.cost - less, held - less
    if last.cost == 0 and held > 0 then
      last = pop()
      entries = { last }
    end
  else
    -- The younger entries stay, so no more comes free than the true history would free.
    held = held - min(permits, held)
  end
  last.cost, last.changed = min(last.cost, held), true
  -- A log without permits keeps the time, and holds nobody up.
  if held == 0 then
    last.start, fresh, entries = time, true, { last }
  end
end

local reply = { 0, now, time, used, oldest, earliest }
local changed = false
if op == 'ask' then
  while position <= #ARGV[3] do
    local permits, wait, asked
    permits, wait, asked, position = struct.unpack('>i8i8i8', ARGV[3], position)
    changed = changed or redated and asked > 0
    local header, left = #reply + 1, asked
    reply[header] = 0
    -- The next `many` asks of this run have this start.
    local function answer(many, start)
      reply[header] = reply[header] + 1
      reply[#reply + 1] = many
      reply[#reply + 1] = start
      left = left - many
    end
    local function admit(many, start)
      add(start, many * permits)
      reply[1], changed = reply[1] + many, true
      answer(many, start)
    end
    local fit = earliest == time and min(asked, floor((limit - used) / permits)) or 0
    if fit > 0 then
      admit(fit, time)
    end
    if asked == 0 then
      answer(0, start_of(permits))
    end
    while left > 0 do
      local start = start_of(permits)
      if start == time or start - now <= max(0, min(wait, length)) then
        admit(1, start)
      elseif count_denied == 1 and earliest == time and used < limit then
        answer(1, start)
        add(time, min(permits, limit - used))
        changed = true
      else
        answer(left, start)
      end
    end
  end
elseif op == 'charge' then
  local permits = struct.unpack('>i8', ARGV[3], position)
  permits = min(permits, 2 * limit - used)
  if permits > 0 then
    add(earliest, permits)
  end
  changed = permits > 0 or redated
elseif op == 'refund' then
  local permits, at = struct.unpack('>i8i8', ARGV[3], position)
  permits = min(permits, limit)
  changed = redated and permits > 0
  if permits > 0 and used > 0 and at > time - length then
    changed = true
    give_back(permits, at)
  end
end

if changed then
  save(entries, time, apart(last.sum, held), fresh)
  expire(key, last.start + retention)
end
return packed(reply)
