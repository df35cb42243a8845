-- KEYS[1]  the state of one key: a hash, all numbers in it with eight bytes, the highest first
--            head    the number of the oldest chunk that is stored, the number of the oldest entry, how many entries are in chunks; the
--                    sum before the oldest entry; the latest time that this log has seen; of the newest entry its start, sum and cost
--            NUMBER  a chunk of entries: for each its start in microseconds and the running sum of all costs with its own. What an
--                    entry has cost is its sum less the one before
--
-- Only the newest entry is ever changed, and the head is written each time anyway: so that is where it is kept. A log grows by chunks,
-- and nothing of what it holds is copied.
local HEAD, HEAD_BYTES, ENTRY, ENTRY_BYTES = '>i8i8i8i8i8i8i8i8', 64, '>i8i8', 16
-- Entries of a chunk: with what the server adds, they fill an allocation of 1 KiB.
local CHUNK = 63
-- The most chunks that one call removes: a large log that expires must not hold the server up.
local TRIM_MAX = 16

-- What log.lua reads: the newest entry and the latest time that this log has seen. Sums: of the newest, before the oldest.
local stored, seen, newest_start, newest_sum, gone_sum
local first_chunk, first, count = 0, 0, 0
local head = call('HMGET', key, 'head')[1]
if head then
  if #head ~= HEAD_BYTES then
    error('TOLLGATE foreign value: not a packed log')
  end
  local cost
  first_chunk, first, count, gone_sum, seen, newest_start, newest_sum, cost = struct.unpack(HEAD, head)
  stored = { start = newest_start, sum = newest_sum, cost = cost }
end

-- The last chunk that was read is mostly the next one that is wanted.
local chunk, chunk_number
local function read(number)
  if chunk_number ~= number then
    chunk, chunk_number = call('HMGET', key, number)[1], number
  end
  return chunk
end

-- An entry by its rank, counted from the oldest: start, sum. Nothing beyond the newest.
local function entry(rank)
  if rank > count then
    return
  elseif rank == count then
    return newest_start, newest_sum
  end
  local number = floor((first + rank) / CHUNK)
  return struct.unpack(ENTRY, read(number), (first + rank - number * CHUNK) * ENTRY_BYTES + 1)
end

local function newest_rank()
  return count
end

-- The rank of the first entry after an instant, which may be asked for again.
local ranks = {}
local function rank_after(instant)
  ranks[instant] = ranks[instant] or search(0, count, function(rank)
    return entry(rank) > instant
  end)
  return ranks[instant]
end

-- Permits of the entries from a rank on.
local function permits_from(rank)
  local before = gone_sum
  if rank > 0 then
    before = select(2, entry(rank - 1))
  end
  return apart(newest_sum, before)
end

-- Permits of the entries after an instant; of the first of them its start and cost.
local function first_after(instant)
  local rank = rank_after(instant)
  if rank > count then
    return 0
  end
  local permits, start, sum = permits_from(rank), entry(rank)
  return permits, start, permits - apart(newest_sum, sum)
end

-- Takes the newest entry out; the one before it is the newest then.
local function pop()
  local start, sum = entry(count - 1)
  local before = gone_sum
  if count > 1 then
    before = select(2, entry(count - 2))
  end
  count = count - 1
  return { start = start, sum = sum, cost = apart(sum, before) }
end

-- Writes entries, of which the last is the newest. Permits up to `gone` are gone; all that was stored is, if it is `fresh`.
local function save(entries, time, gone, fresh)
  if fresh then
    first_chunk, first, count = 0, 0, 0
    if stored then
      call('UNLINK', key)
    end
  else
    local left, kept = apart(newest_sum, gone), nil
    for _, rank in pairs(ranks) do
      kept = kept or rank <= count and permits_from(rank) == left and rank
    end
    kept = kept or search(0, count - 1, function(rank)
      local _, sum = entry(rank)
      return apart(newest_sum, sum) < left
    end)
    first, count = first + kept, count - kept
  end
  -- The entries before the newest go behind those of the last chunk.
  local written, text = {}, nil
  for index = 1, #entries - 1 do
    local number = floor((first + count) / CHUNK)
    local place = first + count - number * CHUNK
    text = text or place > 0 and string.sub(read(number), 1, place * ENTRY_BYTES) or ''
    text, count = text .. struct.pack(ENTRY, entries[index].start, entries[index].sum), count + 1
    if place == CHUNK - 1 or index == #entries - 1 then
      written[#written + 1], written[#written + 2] = number, text
      text = nil
    end
  end
  local last, kept_chunk = entries[#entries], min(floor(first / CHUNK), first_chunk + TRIM_MAX)
  local new_head = struct.pack(HEAD, kept_chunk, first, count, gone, time, last.start, last.sum, last.cost)
  call('HSET', key, 'head', new_head, unpack(written))
  if kept_chunk > first_chunk then
    local numbers = {}
    for number = first_chunk, kept_chunk - 1 do
      numbers[#numbers + 1] = number
    end
    call('HDEL', key, unpack(numbers))
  end
end
