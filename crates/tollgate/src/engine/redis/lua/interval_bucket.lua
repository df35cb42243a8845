-- TOKEN_BUCKET with interval refill: the twin of interval_bucket.rs, number for number.
--
-- KEYS[1]  the state of one key: a hash with
--            tokens       whole permits, negative while reservations or debts are due
--            last_refill  when the running period began, in microseconds
-- ARGV[3]  of the limit: capacity in permits, permits that come back each period, the period in microseconds
--
-- Returns { how many were admitted, now, tokens, last_refill }, the fields as they were before.
local op = ARGV[2]
local capacity, refill, period, position = struct.unpack('>i8i8i8', ARGV[3])
local horizon = ceil(capacity / refill) * period

local stored = call('HMGET', KEYS[1], 'tokens', 'last_refill')
local tokens, last = capacity, now
if stored[1] or stored[2] then
  -- Bounds hold what was written under another limit.
  tokens, last = max(-capacity - refill, min(whole(stored[1]), capacity)), whole(stored[2])
end

if ARGV[5] then
  local since = struct.unpack('>i8', ARGV[5])
  if not stored[2] or last <= since then
    -- Empty when the server took over, and for the period that begins there.
    local periods = floor((since - last) / period)
    local refilled = not stored[2] or periods >= ceil((capacity - tokens) / refill)
    tokens, last = min(refilled and capacity or tokens + periods * refill, 0), since
  end
end
local redated = last - now > horizon
if redated then
  last, tokens = now, min(tokens, 0)
end
local time = max(now, last)
local periods = floor((time - last) / period)
if periods >= ceil((capacity - tokens) / refill) then
  -- A full bucket has no phase: the next use starts a period.
  tokens, last = capacity, time
else
  tokens, last = tokens + periods * refill, last + periods * period
end

local admitted, changed = 0, false
if op == 'ask' or op == 'look' then
  while position <= #ARGV[3] do
    local cost, wait, count
    cost, wait, count, position = struct.unpack('>i8i8i8', ARGV[3], position)
    changed = changed or redated and count > 0
    local fit = max(0, min(count, floor(tokens / cost)))
    if fit > 0 then
      tokens, admitted, changed = tokens - fit * cost, admitted + fit, true
    end
    if wait > 0 then
      for _ = fit + 1, count do
        local needed = ceil((cost - tokens) / refill)
        if last + needed * period - now > min(wait, horizon) then
          break
        end
        tokens, admitted, changed = min(tokens, capacity - needed * refill) - cost, admitted + 1, true
      end
    end
  end
  if ARGV[4] and ARGV[4] ~= '' then
    local wanted, parts = struct.unpack('>i8i8', ARGV[4])
    local lent = max(0, min(wanted, ceil(tokens / parts)))
    changed = changed or redated and wanted > 0
    if lent > 0 then
      tokens, admitted, changed = tokens - lent, admitted + lent, true
    end
  end
elseif op == 'refund' or op == 'return' then
  local cost, start = struct.unpack('>i8i8', ARGV[3], position)
  local credit = 0
  cost = min(cost, capacity)
  if start > time then
    if tokens < 0 and start == last + ceil(-tokens / refill) * period then
      credit = cost
    end
  elseif tokens >= 0 then
    -- Refills that came after the start have already given these permits back.
    local refills = start >= last and 0 or ceil((last - start) / period)
    if refills < ceil(cost / refill) then
      credit = cost - refills * refill
    end
  end
  if credit > 0 and tokens < capacity then
    tokens, changed = min(capacity, tokens + credit), true
  end
elseif op == 'charge' then
  local cost = struct.unpack('>i8', ARGV[3], position)
  if cost > 0 then
    tokens = max(tokens - min(cost, 2 * capacity), min(tokens, -capacity))
    changed = true
  end
end

if changed and op ~= 'look' then
  call('HSET', KEYS[1], 'tokens', tokens, 'last_refill', last)
  if op == 'return' then
    call('HSET', KEYS[1], 'returns', ARGV[4] + 1)
  end
  expire(KEYS[1], last + ceil((capacity - tokens) / refill) * period)
end
return { admitted, now, stored[1], stored[2] }
