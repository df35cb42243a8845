-- What both ways of keeping a log do. Before this stands the text that reads one, which sets
--   time, used, base, oldest, earliest   what counts, as the answer has it. Older entries may be kept, for a longer window
--   last                                 the newest entry: start, sum, cost
--   wipe                                 whether the log was re-dated: `last` is all of it
--   add, start_of, give_back, save       what is done to it; nothing is written before `save`
--
-- ARGV[3]  of the limit: limit in permits, the window in microseconds, how long entries are kept in microseconds, 1 if denied requests
--          count. A run of 0 only asks when it could start
--
-- Returns { how many were admitted, now, the time that counts as now, permits that count, the oldest start that counts (-1:
-- none), the earliest start that keeps the order }, all as they were before, and then for each run: how many groups, and
-- for each group how many asks and their start.
local reply = { 0, now, time, used, oldest, earliest }
local changed = false
if op == 'ask' then
  while position <= #ARGV[3] do
    local permits, wait, asked
    permits, wait, asked, position = struct.unpack('>i8i8i8', ARGV[3], position)
    changed = changed or wipe and asked > 0
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
  changed = permits > 0 or wipe
elseif op == 'refund' then
  local permits, at = struct.unpack('>i8i8', ARGV[3], position)
  permits = min(permits, limit)
  changed = wipe and permits > 0
  if permits > 0 and used > 0 and at > time - length then
    changed = true
    give_back(permits, at)
    -- A log without permits keeps the time, and holds nobody up.
    if last.cost == 0 then
      last.start = time
    end
  end
end

if changed then
  save()
  expire(key, last.start + retention)
end
return reply
