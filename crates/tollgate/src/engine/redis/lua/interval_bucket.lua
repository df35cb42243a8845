-- TOKEN_BUCKET with interval refill: the twin of interval_bucket.rs, number for number.
--
-- KEYS[1]  the state of one key: a hash with
--            tokens       whole permits, negative while reservations or debts are due
--            last_refill  when the running period began, in microseconds
-- ARGV[2]  ask, look, refund or charge
-- ARGV[3]  capacity in permits, ARGV[4] permits that come back each period, ARGV[5] the period in microseconds
-- ARGV[6]  what is asked, as in bucket.lua
--
-- Returns { how many were admitted, now, tokens, last_refill }, the fields as they were before.
local op = ARGV[2]
local capacity, refill, period = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local horizon = math.ceil(capacity / refill) * period

local stored = redis.call('HMGET', KEYS[1], 'tokens', 'last_refill')
local tokens, last = capacity, now
if stored[1] then
  -- Bounds hold what was written under another limit.
  tokens, last = math.max(-capacity - refill, math.min(whole(stored[1]), capacity)), whole(stored[2])
end

local redated = last - now > horizon
if redated then
  last, tokens = now, math.min(tokens, 0)
end
local time = math.max(now, last)
local periods = math.floor((time - last) / period)
if periods >= math.ceil((capacity - tokens) / refill) then
  -- A full bucket has no phase: the next use starts a period.
  tokens, last = capacity, time
else
  tokens, last = tokens + periods * refill, last + periods * period
end

local admitted, changed = 0, false
if op == 'ask' or op == 'look' then
  for run = 6, #ARGV, 3 do
    local cost, wait, count = tonumber(ARGV[run]), tonumber(ARGV[run + 1]), tonumber(ARGV[run + 2])
    changed = changed or redated and count > 0
    local fit = math.max(0, math.min(count, math.floor(tokens / cost)))
    if fit > 0 then
      tokens, admitted, changed = tokens - fit * cost, admitted + fit, true
    end
    if wait > 0 then
      for _ = fit + 1, count do
        local needed = math.ceil((cost - tokens) / refill)
        if last + needed * period - now > math.min(wait, horizon) then
          break
        end
        tokens, admitted, changed = math.min(tokens, capacity - needed * refill) - cost, admitted + 1, true
      end
    end
  end
elseif op == 'refund' then
  local cost, start, credit = math.min(tonumber(ARGV[6]), capacity), tonumber(ARGV[7]), 0
  if start > time then
    if tokens < 0 and start == last + math.ceil(-tokens / refill) * period then
      credit = cost
    end
  elseif tokens >= 0 then
    -- Refills that came after the start have already given these permits back.
    local refills = start >= last and 0 or math.ceil((last - start) / period)
    if refills < math.ceil(cost / refill) then
      credit = cost - refills * refill
    end
  end
  if credit > 0 and tokens < capacity then
    tokens, changed = math.min(capacity, tokens + credit), true
  end
elseif op == 'charge' then
  local cost = tonumber(ARGV[6])
  if cost > 0 then
    tokens = math.max(tokens - math.min(cost, 2 * capacity), math.min(tokens, -capacity))
    changed = true
  end
end

if changed and op ~= 'look' then
  redis.call('HSET', KEYS[1], 'tokens', tokens, 'last_refill', last)
  expire(KEYS[1], last + math.ceil((capacity - tokens) / refill) * period)
end
return { admitted, now, stored[1], stored[2] }
