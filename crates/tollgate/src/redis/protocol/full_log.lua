-- The log of sliding_log.lua in every state: denials, reservations, refunds, a clock that was set back.
--
-- It may hold members that are no longer part of the log: then the member SUM:0:0 with the score -inf says that permits up to SUM are gone.
-- Sums start again at 2^53, so that a key that is never idle does not run out of them. Two sums are compared by their difference.
--
-- Numbers of the limit: limit in permits, the window in microseconds, 1 if denied requests count; how long entries are kept in microseconds
-- and how many of those that are older than the window; the same two for as long as an earlier limit still matters, and until when that is
-- in microseconds. Then the steps as in single.lua; here count 0 only asks when a request could start, and -2 charges `cost`.
--
-- Returns numbers: how many were admitted; now; the time that counts as now, permits that count, the oldest start that counts (-1: none),
-- the earliest start that keeps the order, all before the first step; and then for each run: how many groups, and for each group how many
-- asks and their start.
local MEMBER, SUMS = '%016.0f:%.0f:%.0f', 9007199254740992
-- The most members that one call removes: a large log that expires must not block the server.
local TRIM_MAX = 64
local limit, length, counts_denied, retention, retained, earlier_retention, earlier_retained, lapses_at
own, limit, length, counts_denied, retention, retained, earlier_retention, earlier_retained, lapses_at, position =
  struct.unpack('>I4c0dddddddd', numbers, position)
if now < lapses_at then
  retention, retained = earlier_retention, earlier_retained
end

-- The difference of a sum and a later one.
local function apart(sum, before)
  return (sum - before) % SUMS
end

-- The start, sum, cost and lead of a member. Nothing beyond the newest.
local function parsed(found)
  if found[1] then
    local sum, cost, lead = string.match(found[1], '^(%d+):(%d+):(-?%d+)$')
    if not sum then
      error('TOLLGATE foreign value: ' .. string.sub(found[1], 1, 64))
    end
    return tonumber(found[2]), tonumber(sum), tonumber(cost), tonumber(lead)
  end
end
local function entry(rank)
  return parsed(call('ZRANGE', key, rank, rank, 'WITHSCORES'))
end

-- The first rank from `low` to `high` that `holds`, or high + 1. If one does, so do all after it.
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

-- The newest entry; sums of the newest and before the oldest; the latest time that this log has seen.
local newest, newest_sum, gone_sum, seen
local found = call('ZRANGE', key, -1, -1, 'WITHSCORES')
if found[1] then
  local start, sum, cost, lead = parsed(found)
  local _, first_sum, first_cost = entry(0)
  newest_sum, gone_sum, seen = sum, apart(first_sum, first_cost), start - lead
  newest = { start = start, sum = sum, cost = min(cost, apart(sum, gone_sum)), member = found[1] }
end
local function rank_after(instant)
  return call('ZCOUNT', key, '-inf', string.format('%.0f', instant))
end

-- Permits of the entries after an instant; of the first of them its start and cost.
local function first_after(instant)
  local after = '(' .. string.format('%.0f', instant)
  local start, sum, cost = parsed(call('ZRANGEBYSCORE', key, after, '+inf', 'WITHSCORES', 'LIMIT', 0, 1))
  if not start then
    return 0
  end
  local permits, left = apart(newest_sum, sum) + cost, apart(newest_sum, gone_sum)
  if permits <= left then
    return permits, start, cost
  elseif left == 0 then
    return 0
  end
  -- A window that is longer than the retention of this log reaches members that are not part of it.
  start, sum = entry(bisect(rank_after(instant), call('ZCARD', key) - 1, function(rank)
    return apart(newest_sum, (select(2, entry(rank)))) < left
  end))
  return left, start, left - apart(newest_sum, sum)
end
