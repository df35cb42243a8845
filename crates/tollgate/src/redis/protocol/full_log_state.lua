-- Follows full_log.lua: the log at this time, and when the next request could start.

-- The time that counts as now: never before the latest time that this log has seen. Permits that count; permits of all entries that are kept, which may be
-- older, for a longer window.
local time, used, held, oldest, oldest_cost = now, 0, 0, -1, nil
-- The newest of the stored entries, and the new entries after it. If it is `fresh`, all others are gone.
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
    -- If the clock was set back by more than a window, all kept permits become one entry, dated now.
    time, used, fresh, redated, oldest = now, held, true, true, held > 0 and now or -1
    entries[1] = { start = now, sum = held, cost = held }
  end
end
local last = entries[1]
local earliest = last and max(time, last.start) or time
-- Permits that count of the stored entries.
local used_before = fresh and 0 or used

-- Admissions with one start share an entry, and an entry without permits only keeps the time: the new entry replaces it.
local function add(start, permits)
  if not last or last.start ~= start and last.cost > 0 then
    last = { start = start, sum = last and last.sum or 0, cost = 0 }
    entries[#entries + 1] = last
  end
  -- In this order no intermediate result is above 2^53.
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
      start = entry(bisect(rank_after(time - length), call('ZCARD', key) - 1, function(rank)
        return apart(newest_sum, (select(2, entry(rank)))) <= used_before - over
      end))
    end
    return max(earliest, start + length)
  end
  for _, it in ipairs(entries) do
    if apart(last.sum, it.sum) <= used - over then
      return max(earliest, it.start + length)
    end
  end
end
