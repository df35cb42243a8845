-- SLIDING_WINDOW, the exact log: the twin of sliding_log.rs, for asks that all fit now. Every other call is for full_log.lua.
--
-- A sorted set with one member for each start at which requests were admitted
--   score   the start in microseconds
--   member  SUM:COST:LEAD, where SUM is the running sum of all costs, with 16 digits so that it also sorts; COST is of this start; and
--           start - LEAD, of the newest, is the latest time that this log has seen
-- Numbers of the limit: limit in permits, the window in microseconds, 1 if denied requests count; how long entries are kept in microseconds
-- and how many of those that are older than the window; the same two for as long as an earlier limit still matters, and until when that is.
--
-- Answers with five numbers: 4, now, permits that count, the oldest start that counts (-1: none), and now.
-- @read
local limit, length, retention, earlier_retention, lapses_at, _
own, limit, length, _, retention, _, earlier_retention, _, lapses_at, cost, wait, count, parts, position =
  struct.unpack('>I4c0dddddddddddd', numbers, position)
if now < lapses_at then
  retention = earlier_retention
end
local sum, used, oldest, expired, added = 0, 0, -1, 0, 0
local newest = call('ZRANGE', key, -1, -1, 'WITHSCORES')
if newest[1] then
  local first = call('ZRANGE', key, 0, 0, 'WITHSCORES')
  if newest[2] - now >= 0 or first[2] == '-inf' then
    @rare
  end
  if first[2] - now + length <= 0 then
    -- The first entries have expired. A few are removed here.
    expired = call('ZCOUNT', key, '-inf', now - length)
    first = call('ZRANGE', key, expired, expired, 'WITHSCORES')
    if expired > 64 or retention > length or not first[1] then
      @rare
    end
  end
  sum, oldest = string.sub(newest[1], 1, 16) + 0, first[2] + 0
  used = sum - string.sub(first[1], 1, 16) + string.match(first[1], ':(%d+):')
  -- Sums that start again, an emptied log, a clock that was set back.
  if used <= 0 or newest[2] - string.match(newest[1], '-?%d+$') - now > 0 then
    @rare
  end
end
-- @reply
struct.pack('>ddddd', 4, now, used, oldest, now)
-- @fit
fit = floor((limit - used - added) / cost)
if fit < count or count == 0 or sum + added + count * cost > 9007199254740991 then
  @rare
end
-- @spend
added = added + n * cost
-- @refund
@rare
-- @write
call('ZADD', key, now_text, string.format('%016.0f:%.0f:0', sum + added, added))
if expired > 0 then
  call('ZREMRANGEBYRANK', key, 0, expired - 1)
end
@expire(now + retention)
