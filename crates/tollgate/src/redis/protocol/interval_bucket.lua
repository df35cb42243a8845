-- TOKEN_BUCKET with interval refill: the twin of interval_bucket.rs.
--
-- A hash with
--   tokens       whole permits, negative while reservations or debts are due
--   last_refill  when the running period began, in microseconds
--   limit        the limit that it was written under: size/refill/period; a suffix marks a state that is not plain
-- Numbers of the limit: capacity in permits, permits that come back each period, the period in microseconds.
-- @read
local capacity, refill, period, since
own, capacity, refill, period, since, cost, wait, count, parts, position =
  struct.unpack('>I4c0dddddddd', numbers, position)
local tokens, last = capacity, now
local stored = call('HMGET', key, 'tokens', 'last_refill', 'limit')
if stored[3] == own then
  tokens, last = stored[1] + 0, stored[2] + 0
  if not (last > since and last - now <= ceil(capacity / refill) * period and
    tokens <= capacity and tokens >= -capacity - refill) then
    @rare
  end
  local time = max(now, last)
  local periods = floor((time - last) / period)
  if periods >= ceil((capacity - tokens) / refill) then
    -- A full bucket has no running period. The next take starts one.
    tokens, last = capacity, time
  else
    tokens, last = tokens + periods * refill, last + periods * period
  end
elseif stored[1] or stored[2] or stored[3] or since > 0 then
  @rare
end
-- @reply
struct.pack('>dd', tokens, last)
-- @fit
fit = floor(tokens / cost)
if fit < count and wait > 0 then
  @rare
end
-- @spend
tokens = tokens - n * cost
-- @refund
if wait > now or tokens < 0 then
  @rare
end
-- Refills that came after the start have already given these permits back.
local credit = cost - (wait >= last and 0 or ceil((last - wait) / period)) * refill
if credit > 0 and tokens < capacity then
  tokens, changed = min(capacity, tokens + credit), true
end
-- @write
if stored[3] then
  call('HSET', key, 'tokens', tokens, 'last_refill', last)
else
  call('HSET', key, 'tokens', tokens, 'last_refill', last, 'limit', own)
end
@expire(last + ceil((capacity - tokens) / refill) * period)
