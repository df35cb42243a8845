-- KEYS[1]  the state of one key: a sorted set with one member for each start at which requests were admitted
--            score   the start in microseconds
--            member  SUM:COST:LEAD, where SUM is the running sum of all costs, with 16 digits so that it also sorts; COST is of
--                    this start; and start - LEAD, of the newest, is the latest time that this log has seen
--          and, while it holds members that are no longer part of the log, the member SUM:0:0 with the score -inf: permits up to SUM
--          are gone
local MEMBER = '%016.0f:%.0f:%.0f'
-- The most members that one call removes: a large log that expires must not hold the server up.
local TRIM_MAX = 64

-- What a member says: sum, cost, lead.
local function parts(member)
  local sum, cost, lead = string.match(member, '^(%d+):(%d+):(-?%d+)$')
  return whole(sum), tonumber(cost), tonumber(lead)
end

-- What log.lua reads: the newest entry and the latest time that this log has seen. Sums: of the newest, before the oldest, of the first
-- member.
local stored, seen, newest_sum, gone_sum, first_sum, first_cost, is_marked
local newest = call('ZRANGE', key, -1, -1, 'WITHSCORES')
if newest[1] then
  local sum, cost, lead = parts(newest[1])
  local first = call('ZRANGE', key, 0, 0, 'WITHSCORES')
  first_sum, first_cost = parts(first[1])
  is_marked = first[2] == '-inf'
  newest_sum, gone_sum = sum, is_marked and first_sum or apart(first_sum, first_cost)
  stored = { start = whole(newest[2]), sum = sum, cost = min(cost, apart(sum, gone_sum)), member = newest[1] }
  seen = stored.start - lead
end

-- A member by its rank: start, sum, cost. Nothing beyond the newest.
local function entry(rank)
  local found = call('ZRANGE', key, rank, rank, 'WITHSCORES')
  if found[1] then
    local sum, cost = parts(found[1])
    return tonumber(found[2]), sum, cost
  end
end

local card
local function newest_rank()
  card = card or call('ZCARD', key)
  return card - 1
end

-- The rank of the first member after an instant.
local function rank_after(instant)
  return call('ZCOUNT', key, '-inf', string.format('%.0f', instant))
end

-- Permits of the entries after an instant; of the first of them its start and cost.
local function first_after(instant)
  local after = '(' .. string.format('%.0f', instant)
  local found = call('ZRANGEBYSCORE', key, after, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  if not found[1] then
    return 0
  end
  local sum, cost = parts(found[1])
  local permits, left = apart(newest_sum, sum) + cost, apart(newest_sum, gone_sum)
  if permits <= left then
    return permits, tonumber(found[2]), cost
  end
  -- A window that is longer than this log was kept for comes to what is gone.
  local rank = bisect(rank_after(instant), newest_rank(), function(at)
    local _, sum_at = entry(at)
    return apart(newest_sum, sum_at) < left
  end)
  if left > 0 then
    local start, sum_at = entry(rank)
    return left, start, left - apart(newest_sum, sum_at)
  end
  return 0
end

-- Permits of the members from a rank on.
local function permits_from(rank)
  local _, sum, cost = entry(rank)
  return apart(newest_sum, sum) + cost
end

-- Takes the newest entry out; the one before it is the newest then.
local popped
local function pop()
  popped = stored.member
  local before = call('ZRANGE', key, -2, -2, 'WITHSCORES')
  local sum, cost = parts(before[1])
  return { start = whole(before[2]), sum = sum, cost = cost, member = before[1] }
end

-- How many of the first members can be removed when permits up to `gone` are gone, and whether the log must say so.
local function removable(gone)
  local left = apart(newest_sum, gone)
  local sum, cost = first_sum, first_cost
  if apart(newest_sum, sum) < left then
    return 0, apart(newest_sum, sum) + cost > left
  elseif gone == sum and not is_marked then
    -- The usual case: one comes, one goes.
    return 1, false
  end
  local many = search(1, TRIM_MAX, function(rank)
    local _, sum_at, cost_at = entry(rank)
    if not sum_at then
      return true
    end
    local is_kept = apart(newest_sum, sum_at) < left
    if is_kept then
      sum, cost = sum_at, cost_at
    end
    return is_kept
  end)
  return min(many, TRIM_MAX), many > TRIM_MAX or apart(newest_sum, sum) + cost > left
end

-- Writes entries, of which the last is the newest. Permits up to `gone` are gone; all that was stored is, if it is `fresh`.
local function save(entries, time, gone, fresh)
  local many, must_say = 0, false
  if not fresh then
    many, must_say = removable(gone)
  elseif stored then
    call('UNLINK', key)
  end
  -- Additions go first: they are what a server without memory refuses.
  for _, it in ipairs(entries) do
    if fresh or it.changed then
      local new = string.format(MEMBER, it.sum, it.cost, it.start - time)
      call('ZADD', key, it.start, new)
      if not fresh and it.member and it.member ~= new then
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
end
