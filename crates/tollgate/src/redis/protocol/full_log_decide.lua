-- Behind sliding_log.lua: decides, and writes with `save`.

-- The time that counts as now: never before what this log has seen. Permits that count; permits of all entries that are kept, which may be
-- older, for a longer window.
local time, used, held, oldest, oldest_cost = now, 0, 0, -1, nil
-- The newest of the stored entries and those that come behind it. If it is `fresh`, all others are gone.
local entries, fresh, redated = {}, true, false
if newest then
  local start
  time = max(now, seen)
  used, start, oldest_cost = first_after(time - length)
  held = used
  if retention > length then
    held = first_after(time - retention)
    local rank = rank_after(time - length) - retained
    if rank > 0 then
      local _, sum, cost = entry(rank)
      held = min(held, apart(newest_sum, sum) + cost)
    end
  end
  fresh, oldest = held == 0, used > 0 and start or -1
  entries[1] = fresh and { start = newest.start, sum = 0, cost = 0 } or newest
  if seen - now > length then
    -- A clock that was set back by more than a window: all that is kept is one entry, of now.
    time, used, fresh, redated, oldest = now, held, true, true, held > 0 and now or -1
    entries[1] = { start = now, sum = held, cost = held }
  end
end
local last = entries[1]
local earliest = last and max(time, last.start) or time
-- Permits that count of the stored entries.
local used_before = fresh and 0 or used

-- One start is one entry, and a log without permits has kept only the time: the new entry takes it in.
local function add(start, permits)
  if not last or last.start ~= start and last.cost > 0 then
    last = { start = start, sum = last and last.sum or 0, cost = 0 }
    entries[#entries + 1] = last
  end
  -- In this order nothing in between is beyond 2^53.
  last.start, last.sum, last.cost, last.changed = start, (last.sum - SUMS + permits) % SUMS, last.cost + permits, true
  used, held, earliest = used + permits, held + permits, start
end

-- The earliest start at which `permits` more fit: when enough of the oldest entries have left.
local function start_of(permits)
  local over = used + permits - limit
  if over <= 0 then
    return earliest
  elseif over <= used_before then
    local start = oldest
    if over > oldest_cost then
      local low = rank_after(time - length)
      local function has_left(rank)
        local start_at, sum = entry(rank)
        return not start_at or apart(newest_sum, sum) <= used_before - over
      end
      -- Where every entry has one permit, it is just so far.
      local rank = low + over - 1
      if not has_left(rank) then
        rank = bisect(rank + 1, last_rank(), has_left)
      elseif rank > low and has_left(rank - 1) then
        rank = bisect(low, rank - 2, has_left)
      end
      start = entry(rank)
    end
    return max(earliest, start + length)
  end
  for _, it in ipairs(entries) do
    if apart(last.sum, it.sum) <= used - over then
      return max(earliest, it.start + length)
    end
  end
end

local popped
local admitted, changed, reply = 0, false, { time, used, oldest, earliest }
while position <= #numbers do
  local permits, wait, asked, _
  permits, wait, asked, _, position = struct.unpack('>dddd', numbers, position)
  if asked == -2 then
    permits = min(permits, 2 * limit - used)
    if permits > 0 then
      add(earliest, permits)
    end
    changed = permits > 0 or redated
  elseif asked == -1 then
    changed = redated and permits > 0
    if permits > 0 and used > 0 and wait > time - length then
      changed = true
      if last.start == wait then
        local less = min(permits, last.cost)
        last.sum, last.cost, held = apart(last.sum, less), last.cost - less, held - less
        if last.cost == 0 and held > 0 then
          popped = last.member
          local start, sum, cost = entry(-2)
          last = { start = start, sum = sum, cost = cost, member = call('ZRANGE', key, -2, -2)[1] }
          entries = { last }
        end
      else
        -- The younger entries stay, so no more comes free than the true history would free.
        held = held - min(permits, held)
      end
      last.cost, last.changed = min(last.cost, held), true
      if held == 0 then
        -- A log without permits keeps the time, and holds nobody up.
        last.start, fresh, entries = time, true, { last }
      end
    end
  else
    changed = changed or redated and asked > 0
    local header, left = #reply + 1, asked
    reply[header] = 0
    -- The next `many` asks of this run have this start.
    local function answer(many, start)
      reply[header], reply[#reply + 1], reply[#reply + 2] = reply[header] + 1, many, start
      left = left - many
    end
    local fit = earliest == time and min(asked, floor((limit - used) / permits)) or 0
    if fit > 0 then
      add(time, fit * permits)
      answer(fit, time)
      admitted, changed = admitted + fit, true
    elseif asked == 0 then
      answer(0, start_of(permits))
    end
    while left > 0 do
      local start = start_of(permits)
      if start == time or start - now <= max(0, min(wait, length)) then
        add(start, permits)
        answer(1, start)
        admitted, changed = admitted + 1, true
      elseif counts_denied == 1 and earliest == time and used < limit then
        answer(1, start)
        add(time, min(permits, limit - used))
        changed = true
      else
        answer(left, start)
      end
    end
  end
end

-- How many of the first members can be removed when permits up to `gone` are gone, and whether the log must say so.
local function removable(gone)
  local left, sum, cost = apart(newest_sum, gone), first_sum, first_cost
  if apart(newest_sum, sum) < left then
    return 0, apart(newest_sum, sum) + cost > left
  elseif gone == sum and not is_marked then
    -- The usual case: one comes, one goes.
    return 1, false
  end
  local function is_kept(rank)
    local start_at, sum_at, cost_at = entry(rank)
    local kept = not start_at or apart(newest_sum, sum_at) < left
    if start_at and kept then
      sum, cost = sum_at, cost_at
    end
    return kept
  end
  -- Mostly it is one of the first: the steps double.
  local low, top = 1, 1
  while top <= TRIM_MAX and not is_kept(top) do
    low, top = top + 1, top * 2
  end
  local many = bisect(low, min(top - 1, TRIM_MAX), is_kept)
  return min(many, TRIM_MAX), many > TRIM_MAX or apart(newest_sum, sum) + cost > left
end

local function save()
  local gone, many, must_say = apart(last.sum, held), 0, false
  if not fresh then
    many, must_say = removable(gone)
  elseif newest then
    call('UNLINK', key)
  end
  -- Additions go first: they are what a server without memory refuses.
  for _, it in ipairs(entries) do
    if fresh or it.changed then
      local member = string.format(MEMBER, it.sum, it.cost, it.start - time)
      call('ZADD', key, it.start, member)
      if not fresh and it.member and it.member ~= member then
        call('ZREM', key, it.member)
      end
    end
  end
  if popped and not fresh then
    call('ZREM', key, popped)
  end
  if many > 0 then
    call('ZREMRANGEBYRANK', key, 0, many - 1)
  end
  if must_say then
    call('ZADD', key, '-inf', string.format(MEMBER, gone, 0, 0))
  end
  call('PEXPIRE', key, ceil(max(0, last.start + retention - now) / 1000) + 1000)
end
