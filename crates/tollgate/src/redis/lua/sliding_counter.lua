-- SLIDING_WINDOW_COUNTER: the twin of sliding_counter.rs, number for number.
--
-- KEYS[1]  the state of one key: a hash with
--            seen  the latest time that this counter has seen, tail the latest start that it has promised, in microseconds
--            sub   the length of its sub-buckets in microseconds
--            N     permits in sub-bucket number N since the epoch
--            limit the limit it was written under: limit/window/sub-buckets, and behind it what lies over, as in fixed_window.lua
--            waiting  reservations that have not started: ' START PERMITS' for each start, the latest last. That one is the tail; where
--                  it is not, the tail is all that is known.
-- ARGV[3]  of the limit: limit in permits, sub-buckets in a window, their length in microseconds, the tick in microseconds in
--          which the weight of the oldest sub-bucket falls (0 if it counts in full), 1 if denied requests count
--
-- Returns { how many were admitted, now, field, value, field, value, ... }, the fields as they were before.
local op, own = ARGV[2], ARGV[4]
local limit, buckets, length, tick, count_denied, position = struct.unpack('>i8i8i8i8i8', ARGV[3])
local window, strict = buckets * length, tick == 0
local length_ticks = strict and 1 or length / tick
local key = KEYS[1]
-- Starts of which account is kept, and of a start of which nothing else is known: more permits than can be given back.
local WAITING_MAX, UNKNOWN = 8, 4503599627370496

local stored = call('HGETALL', key)
local fields, counts = {}, {}
for index = 1, #stored, 2 do
  fields[stored[index]] = stored[index + 1]
end
local over, over_until, asked, written = 0, 0, nil, limit
if stored[1] then
  -- Before there was the field, the length of the sub-buckets was all that was known.
  local under = fields.limit or string.format('%.0f/%.0f/%.0f', limit, whole(fields.sub) * buckets, buckets)
  if under ~= own then
    local before, permits, rest = string.match(under, '^(%S+) over (%d+) (%d+)$')
    over, over_until = whole(permits, 0), whole(rest, 0)
    local a, b, c = string.match(before or under, '^([1-9]%d*)/([1-9]%d*)/([1-9]%d*)$')
    local alike = whole(b) == window and whole(c) == buckets
    written = whole(a)
    -- Counts of the same sub-buckets stay as they are, under every limit.
    if not alike or over_until > 0 and before ~= own then
      asked = { limit, window, buckets, length, alike }
      limit, window, buckets = written, whole(b), whole(c)
      length = window / buckets
    end
  end
end
local seen, tail, redated, carried = now, now, false, false
local waiting = {}
if fields.waiting then
  for start, permits in string.gmatch(fields.waiting, ' (%d+) (%d+)') do
    waiting[#waiting + 1] = { whole(start), whole(permits) }
  end
end
if stored[1] then
  seen, tail = whole(fields.seen), whole(fields.tail)
  local current = floor(seen / length)
  for name, text in pairs(fields) do
    local number = string.find(name, '^%d+$') and tonumber(name)
    -- Older ones were of no account when the others were written.
    if number and number >= current - buckets then
      if number > current + 2 * buckets + 2 then
        error('TOLLGATE foreign value: ' .. name)
      end
      counts[number] = max(0, min(whole(text), 6755399441055744))
    end
  end
end

-- All that is counted, and until when.
local function counted(from)
  local total, full_at = 0, tail
  for index, count in pairs(counts) do
    if index >= from and count > 0 then
      total, full_at = total + count, max(full_at, (index + buckets + 1) * length)
    end
  end
  return total, full_at
end

local doubt = ARGV[6] and struct.unpack('>i8', ARGV[6])
local time
-- Once, or for a state that was cut otherwise twice: as it was, and then as the caller has it.
repeat
  local former = asked
  if seen - now > window then
    counts, tail, waiting = { [floor(now / length)] = min((counted(0)), 3 * limit) }, now, {}
    seen, redated = now, true
    if not former then
      -- After a clock was set back, what lies over matters for as long as the window does.
      over_until = min(over_until, now + window)
    end
  end
  time = max(now, seen)
  if doubt then
    -- The sub-bucket in which the server took over counts as much as the limit that it was written under.
    local index = floor(doubt / length)
    if index >= floor(time / length) - buckets then
      counts[index] = max(counts[index] or 0, written)
    end
  end
  if former then
    -- What was counted stays counted. A denial keeps that, too: it has said how long to wait from now.
    local total, finish = counted(floor(time / length) - buckets)
    local lying, alike = over_until > time and over or 0, former[5]
    if lying > 0 then
      finish = max(finish, over_until)
    end
    limit, window, buckets, length = former[1], former[2], former[3], former[4]
    -- Nobody starts before what was promised, but nobody waits longer for it than this limit lets wait.
    tail = total > 0 and max(time, min(tail, time + window)) or time
    local used, kept = max(total, lying), alike and total or 0
    seen, counts, waiting = time, alike and counts or {}, alike and waiting or {}
    if min(used, limit) > kept then
      local index = floor(tail / length)
      counts[index] = (counts[index] or 0) + min(used, limit) - kept
    end
    local held, full_at = counted(floor(time / length) - buckets)
    over, over_until = used, finish
    if used == 0 or used <= held and finish <= full_at then
      over, over_until = 0, 0
    end
    asked, doubt, redated, carried = nil, nil, true, true
  end
until not former
local earliest = max(time, tail)
local settled = over_until > 0 and counted(floor(time / length) - buckets) or 0

local function at(index)
  return counts[index] or 0
end

local function sum(from, to)
  local total = 0
  for index = from, to do
    total = total + at(index)
  end
  return total
end

-- Permits that count at an instant, rounded up.
local function used(instant)
  local index = floor(instant / length)
  local inside, leaving = sum(index - buckets + 1, index), at(index - buckets)
  if strict then
    return inside + leaving
  end
  local left = length_ticks - floor(instant % length / tick)
  -- Counted under a larger limit it may be too large for an exact product: more than the limit is all that matters then.
  if leaving > floor(limit * length_ticks / left) then
    return inside + limit + 1
  end
  return inside + ceil(leaving * left / length_ticks)
end

-- The earliest instant at which `permits` more fit.
local function start_of(permits)
  local first = floor(earliest / length)
  local inside = sum(first - buckets + 1, first)
  for index = first, first + buckets + 1 do
    local leaving = at(index - buckets)
    local room = limit - permits - inside
    if room >= 0 and (leaving <= room or not strict) then
      local ticks = leaving <= room and 0 or length_ticks - floor(room * length_ticks / leaving)
      local start = max(earliest, index * length + ticks * tick)
      if floor(start / length) == index then
        return start
      end
    end
    inside = inside + at(index + 1) - at(index + 1 - buckets)
  end
  return (first + buckets + 1) * length
end

local admitted, changed = 0, false
local function take(start, permits)
  local index = floor(start / length)
  counts[index] = at(index) + permits
  local latest = waiting[#waiting]
  if tail > time and not (latest and latest[1] == tail) then
    -- Of what was promised before only the latest start is known.
    waiting = { { tail, UNKNOWN } }
  end
  while waiting[1] and waiting[1][1] <= time do
    table.remove(waiting, 1)
  end
  seen, tail, earliest, changed = time, start, start, true
  if start == time then
    return
  end
  latest = waiting[#waiting]
  if latest and latest[1] == start then
    latest[2] = min(UNKNOWN, latest[2] + permits)
  else
    waiting[#waiting + 1] = { start, permits }
  end
  if #waiting > WAITING_MAX then
    local first = table.remove(waiting, 1)
    waiting[1][2] = min(UNKNOWN, waiting[1][2] + first[2])
  end
end

if op == 'ask' then
  while position <= #ARGV[3] do
    local permits, wait, count
    permits, wait, count, position = struct.unpack('>i8i8i8', ARGV[3], position)
    changed = changed or redated and count > 0
    local fit = 0
    if earliest == time and count > 0 then
      fit = max(0, min(count, floor((limit - used(time)) / permits)))
      if fit > 0 then
        take(time, fit * permits)
        admitted = admitted + fit
      end
    end
    for _ = fit + 1, wait > 0 and count or fit do
      local start = start_of(permits)
      if start - now > min(wait, window) then
        break
      end
      take(start, permits)
      admitted, fit = admitted + 1, fit + 1
    end
    if fit < count and count_denied == 1 and earliest == time then
      local left = limit - used(time)
      if left > 0 then
        take(time, min(permits, left))
      end
    end
  end
  if ARGV[5] and ARGV[5] ~= '' then
    local wanted, parts = struct.unpack('>i8i8', ARGV[5])
    local left = earliest == time and limit - used(time) or 0
    local lent = max(0, min(wanted, ceil(left / parts)))
    changed = changed or redated and wanted > 0
    if lent > 0 then
      take(time, lent)
      admitted = admitted + lent
    end
  end
elseif op == 'refund' or op == 'return' then
  local permits, start = struct.unpack('>i8i8', ARGV[3], position)
  local index = floor(start / length)
  local credit = index >= floor(time / length) - buckets and min(at(index), permits, limit) or 0
  if credit > 0 then
    counts[index] = counts[index] - credit
    seen, changed = time, true
    if start > time and waiting[1] and waiting[#waiting][1] == tail then
      -- Nobody waits behind it any longer.
      for place = #waiting, 1, -1 do
        if waiting[place][1] == start then
          waiting[place][2] = waiting[place][2] - credit
          if waiting[place][2] <= 0 then
            table.remove(waiting, place)
          end
        end
      end
      local latest, newest = waiting[1] and waiting[#waiting][1] or time, 0
      for number, count in pairs(counts) do
        newest = count > 0 and max(newest, number) or newest
      end
      -- Charges behind it stay where they are, and later requests stay behind them.
      if newest * length <= latest then
        tail = latest
      end
    end
    if counted(floor(time / length) - buckets) == 0 or tail <= time then
      tail = time
    end
  end
elseif op == 'charge' then
  local index = floor(earliest / length)
  local permits = struct.unpack('>i8', ARGV[3], position)
  changed = carried and permits > 0
  permits = min(permits, 2 * limit - sum(index - buckets, index))
  if permits > 0 then
    take(earliest, permits)
  end
end

if changed then
  local set, removed, full_at = { key, 'seen', seen, 'tail', tail, 'sub', length }, { key }, tail
  local text = own
  if over_until > time then
    -- Whatever is counted is also counted there, as long as it matters.
    local taken = counted(floor(time / length) - buckets) - settled
    text, full_at = string.format('%s over %.0f %.0f', own, max(0, over + taken), over_until), max(tail, over_until)
  end
  if fields.limit ~= text then
    set[#set + 1] = 'limit'
    set[#set + 1] = text
  end
  local starts = ''
  for place = 1, tail > time and #waiting or 0 do
    starts = starts .. string.format(' %.0f %.0f', waiting[place][1], waiting[place][2])
  end
  if starts ~= '' and starts ~= fields.waiting then
    set[#set + 1] = 'waiting'
    set[#set + 1] = starts
  elseif starts == '' and fields.waiting then
    removed[#removed + 1] = 'waiting'
  end
  for index, count in pairs(counts) do
    if count > 0 and index >= floor(time / length) - buckets then
      local name = string.format('%.0f', index)
      full_at = max(full_at, (index + buckets + 1) * length)
      if fields[name] ~= string.format('%.0f', count) then
        set[#set + 1] = name
        set[#set + 1] = count
      end
      fields[name] = nil
    end
  end
  for name in pairs(fields) do
    if string.find(name, '^%d+$') then
      removed[#removed + 1] = name
    end
  end
  if op == 'return' then
    set[#set + 1] = 'returns'
    set[#set + 1] = ARGV[5] + 1
  end
  call('HSET', unpack(set))
  if removed[2] then
    call('HDEL', unpack(removed))
  end
  expire(key, full_at)
end
local reply = { admitted, now }
for index = 1, #stored do
  reply[index + 2] = stored[index]
end
return packed(reply)
