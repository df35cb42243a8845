-- SLIDING_WINDOW, the exact log: the twin of sliding_log.rs, number for number. Every way of keeping a log begins with this text, then
-- comes the text that reads and writes the log, then log.lua, which decides.
--
-- ARGV[3]  of the limit: limit in permits, the window in microseconds, 1 if denied requests count; how long entries are kept in
--          microseconds and how many of those that are older than the window; the same two for as long as an earlier limit still
--          matters, and until when that is in microseconds. A run of 0 only asks when it could start
local op = ARGV[2]
local limit, length, count_denied, retention, retained, earlier_retention, earlier_retained, lapses_at, position =
  struct.unpack('>i8i8i8i8i8i8i8i8', ARGV[3])
if now < lapses_at then
  retention, retained = earlier_retention, earlier_retained
end
local key = KEYS[1]

-- Each entry holds the running sum of all costs up to its own. Sums start again at 2^53, or a key that is never idle would one day run
-- out of them. What is compared is how far apart two are.
local SUMS = 9007199254740992
local function plus(sum, permits)
  -- In this order nothing in between is beyond 2^53.
  return (sum - SUMS + permits) % SUMS
end
local function apart(sum, before)
  return (sum - before) % SUMS
end

-- The first number from `low` to `high` that `holds`, or high + 1. If one does, so do all after it.
local function bisect(low, high, holds)
  while low <= high do
    local middle = floor((low + high) / 2)
    if holds(middle) then
      high = middle - 1
    else
      low = middle + 1
    end
  end
  return low
end

-- The same where it is mostly close to `low`: the steps begin small and double.
local function search(low, high, holds)
  local top, step = low, 1
  while top <= high and not holds(top) do
    low, top, step = top + 1, top + step, step * 2
  end
  return bisect(low, min(top - 1, high), holds)
end
