-- SLIDING_WINDOW, the exact log in one string: the twin of sliding_log.lua, with the same ARGV, answer and decisions.
--
-- KEYS[1]  the state of one key: a string of a head and a ring, all numbers with the highest byte first
--            head  'TGL1'; four bytes each: how many entries the ring has room for, the place of its oldest, how many it holds;
--                  eight bytes each: the sum before the oldest, the latest time that this log has seen, and of the newest
--                  entry its start, sum and cost
--            ring  all entries but the newest, eight bytes each for the start in microseconds and the running sum of all costs
--                  with its own. What an entry has cost is its sum less the one before
--
-- Only the newest entry is ever changed, and the head is written each time anyway: so that is where it is kept.
local op = ARGV[2]
local limit, length, retention, count_denied, position = struct.unpack('>i8i8i8i8', ARGV[3])
local key = KEYS[1]
local HEAD, HEAD_BYTES, ENTRY, ENTRY_BYTES = '>c4I4I4I4i8i8i8i8i8', 56, '>i8i8', 16

-- Sums start again at 2^53, or a key that is never idle would one day run out of them. What is compared is how far apart two
-- are, which is at most twice the limit.
local SUMS = 9007199254740992
local function sum_after(sum, permits)
  -- In this order nothing in between is beyond 2^53.
  return (sum - SUMS + permits) % SUMS
end
local function apart(sum, before)
  return (sum - before) % SUMS
end

-- `last` is the newest entry; `closed` are entries that come behind those of the ring.
local last, closed, wipe = nil, {}, false
-- The time that counts as now: never before what this log has seen. Permits that count, and the sum before the first.
local time, used, base, oldest = now, 0, 0, -1
local room, first, count = 0, 0, 0
-- Entries of the ring before `kept` are not kept, and those before `live` no longer count. The sum before the first that is kept, and
-- the permits from there on.
local kept, live, kept_base, held = 0, 0, 0, 0

-- An entry of the ring, by its age: start, sum. Sixteen are read at once: the next one wanted is mostly among them.
local block, block_first
local function entry(index)
  local place = (first + index) % room
  local from = place - place % 16
  if block_first ~= from then
    local at = HEAD_BYTES + from * ENTRY_BYTES
    block, block_first = call('GETRANGE', key, at, at + 16 * ENTRY_BYTES - 1), from
  end
  return struct.unpack(ENTRY, block, (place - from) * ENTRY_BYTES + 1)
end

-- The first entry of the ring, from `from` on, that `holds`: how old it is and its start; and the sum of the one before, if
-- that was looked at. It is mostly close, so the steps begin small and double.
local function find(from, holds)
  local low, high, step = from, from, 1
  local found, before
  while high < count do
    local start, sum = entry(high)
    if holds(start, sum) then
      found = start
      break
    end
    low, high, step, before = high + 1, high + step, step * 2, sum
  end
  high = min(high, count)
  while low < high do
    local middle = floor((low + high) / 2)
    local start, sum = entry(middle)
    if holds(start, sum) then
      high, found = middle, start
    else
      low, before = middle + 1, sum
    end
  end
  return low, found, before
end

local head = call('GETRANGE', key, 0, HEAD_BYTES - 1)
if head ~= '' then
  if #head < HEAD_BYTES or string.sub(head, 1, 4) ~= 'TGL1' then
    error('TOLLGATE foreign value: not a packed log')
  end
  local _, seen, start, sum, cost
  _, room, first, count, base, seen, start, sum, cost = struct.unpack(HEAD, head)
  last = { start = start, sum = sum, cost = cost }
  time = max(now, seen)
  -- From an entry on, the first that is younger than an instant, the sum before it and its start. If nothing in the ring is, it is the
  -- newest entry.
  local function first_after(instant, from, from_base)
    if start <= instant then
      return count, sum, nil
    end
    local index, found, before = find(from, function(at)
      return at > instant
    end)
    return index, index == count and apart(sum, cost) or before or from_base, found
  end
  kept, kept_base = first_after(time - retention, 0, base)
  local found
  live, base, found = first_after(time - length, kept, kept_base)
  used, held = apart(sum, base), apart(sum, kept_base)
  if start > time - length then
    oldest = found or cost > 0 and start or -1
  end
  -- A clock that was set back by more than a window: all that is kept is one entry, of now.
  if seen - now > length then
    time, wipe, live, kept, base, kept_base = now, true, count, count, 0, 0
    used, oldest = held, held > 0 and now or -1
    last = { start = now, sum = held, cost = held }
  end
end
local earliest = last and max(time, last.start) or time

-- One start is one entry, and a log without permits has kept only the time: the new entry takes it in.
local function add(start, permits)
  if last and (last.start == start or last.cost == 0) then
    last.start, last.sum, last.cost = start, sum_after(last.sum, permits), last.cost + permits
  else
    if held > 0 then
      closed[#closed + 1] = last
    end
    last = { start = start, sum = sum_after(last and last.sum or 0, permits), cost = permits }
  end
  used, held, earliest = used + permits, held + permits, start
end

-- The earliest start at which `permits` more fit: when enough of the oldest entries have left.
local function start_of(permits)
  local over = used + permits - limit
  if over <= 0 then
    return earliest
  end
  local _, found = find(live, function(_, sum)
    return apart(sum, base) >= over
  end)
  for index = 1, found and 0 or #closed do
    if apart(closed[index].sum, base) >= over then
      found = closed[index].start
      break
    end
  end
  return max(earliest, (found or last.start) + length)
end

-- Gives back permits of the grant that was to start at `at`.
local function give_back(permits, at)
  if last.start == at then
    local less = min(permits, last.cost)
    last.sum, last.cost = apart(last.sum, less), last.cost - less
    if last.cost == 0 and held > less then
      local start, sum = entry(count - 1)
      -- What its cost is, the one before tells, if there is one that is kept.
      local before = kept_base
      if count - 1 > kept then
        before = select(2, entry(count - 2))
      end
      last, count = { start = start, sum = sum, cost = apart(sum, before) }, count - 1
    end
  else
    -- The younger entries stay, so no more comes free than the true history would free.
    local less = min(permits, held)
    local before = kept_base
    kept = find(kept, function(_, sum)
      return apart(sum, before) > less
    end)
    kept_base = sum_after(kept_base, less)
    if kept == count then
      last.cost = apart(last.sum, kept_base)
    end
  end
end

local function save()
  local function place(index)
    return HEAD_BYTES + (first + index) % room * ENTRY_BYTES
  end
  local function packed(size, oldest_place, entries)
    return struct.pack(HEAD, 'TGL1', size, oldest_place, entries, kept_base, time, last.start, last.sum, last.cost)
  end
  local ringed = count - kept
  local entries = ringed + #closed
  -- A burst long gone must not hold its memory for ever; that of a few entries is not worth the work.
  if head == '' or entries > room or room > 16 and entries * 4 < room then
    -- Written anew, with room for a quarter more: what is copied is a few entries for each that comes.
    local parts = {}
    if ringed > 0 then
      local from, to = place(kept), place(count - 1)
      if from <= to then
        parts[1] = call('GETRANGE', key, from, to + ENTRY_BYTES - 1)
      else
        parts[1] = call('GETRANGE', key, from, -1)
        parts[2] = call('GETRANGE', key, HEAD_BYTES, to + ENTRY_BYTES - 1)
      end
    end
    for _, it in ipairs(closed) do
      parts[#parts + 1] = struct.pack(ENTRY, it.start, it.sum)
    end
    -- Put together by the server: in Lua that takes three times as long, which is many milliseconds for a large log. A string
    -- that is made by SETRANGE has the size that was asked for; one that grows is given up to twice of it. The first call is for
    -- a server without memory to refuse: it would allow DEL, and what comes after it.
    local size, at = entries + ceil(entries / 4), HEAD_BYTES
    call('SETRANGE', key, 0, 'TGL1')
    call('DEL', key)
    call('SETRANGE', key, HEAD_BYTES + size * ENTRY_BYTES - 1, '\0')
    for _, part in ipairs(parts) do
      call('SETRANGE', key, at, part)
      at = at + #part
    end
    call('SETRANGE', key, 0, packed(size, 0, entries))
  else
    for index, it in ipairs(closed) do
      call('SETRANGE', key, place(count + index - 1), struct.pack(ENTRY, it.start, it.sum))
    end
    call('SETRANGE', key, 0, packed(room, room > 0 and (first + kept) % room or 0, entries))
  end
end
