-- SLIDING_WINDOW_COUNTER: the twin of sliding_counter.rs, number for number.
--
-- KEYS[1]  the state of one key: a hash with
--            seen  the latest time that this counter has seen, tail the latest start that it has promised, in microseconds
--            sub   the length of its sub-buckets in microseconds
--            N     permits in sub-bucket number N since the epoch
-- ARGV[3]  of the limit: limit in permits, sub-buckets in a window, their length in microseconds, the tick in microseconds in
--          which the weight of the oldest sub-bucket falls (0 if it counts in full), 1 if denied requests count
--
-- Returns { how many were admitted, now, field, value, field, value, ... }, the fields as they were before.
local op = ARGV[2]
local limit, buckets, length, tick, count_denied, position = struct.unpack('>i8i8i8i8i8', ARGV[3])
local window, strict = buckets * length, tick == 0
local length_ticks = strict and 1 or length / tick
local key = KEYS[1]

local stored = call('HGETALL', key)
local fields, counts = {}, {}
for index = 1, #stored, 2 do
  fields[stored[index]] = stored[index + 1]
end
local seen, tail = now, now
if stored[1] then
  seen, tail = whole(fields.seen), whole(fields.tail)
  local total, current = 0, floor(seen / length)
  local same = whole(fields.sub) == length
  for name, text in pairs(fields) do
    local number = string.find(name, '^%d+$') and tonumber(name)
    -- Older ones were of no account when the others were written.
    if number and (not same or number >= current - buckets) then
      local count = max(0, min(whole(text), 3 * limit))
      if same and number > current + 2 * buckets + 2 then
        error('TOLLGATE foreign value: ' .. name)
      end
      counts[number], total = count, total + count
    end
  end
  if not same then
    -- Cut otherwise under another limit: all of it counts as taken last.
    counts, tail = { [current] = min(total, limit) }, seen
  end
end

local redated = seen - now > window
if redated then
  local total = 0
  for _, count in pairs(counts) do
    total = total + count
  end
  counts, seen, tail = { [floor(now / length)] = min(total, 3 * limit) }, now, now
end
local time = max(now, seen)
if ARGV[5] then
  -- The sub-bucket in which the server took over counts as much as the limit.
  local since = struct.unpack('>i8', ARGV[5])
  local index = floor(since / length)
  if index >= floor(time / length) - buckets then
    counts[index] = max(counts[index] or 0, limit)
  end
end
local earliest = max(time, tail)

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
  return inside + ceil(leaving * (length_ticks - floor(instant % length / tick)) / length_ticks)
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
  seen, tail, earliest, changed = time, start, start, true
end

if op == 'ask' or op == 'look' then
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
  if ARGV[4] and ARGV[4] ~= '' then
    local wanted, parts = struct.unpack('>i8i8', ARGV[4])
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
    -- Nothing is promised any more, so nobody waits behind it.
    local left = 0
    for number, count in pairs(counts) do
      left = left + (number >= floor(time / length) - buckets and count or 0)
    end
    if left == 0 then
      tail = time
    end
  end
elseif op == 'charge' then
  local index = floor(earliest / length)
  local permits = struct.unpack('>i8', ARGV[3], position)
  permits = min(permits, 2 * limit - sum(index - buckets, index))
  if permits > 0 then
    take(earliest, permits)
  end
end

if changed and op ~= 'look' then
  local set, removed, full_at = { key, 'seen', seen, 'tail', tail, 'sub', length }, { key }, tail
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
    set[#set + 1] = ARGV[4] + 1
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
return reply
