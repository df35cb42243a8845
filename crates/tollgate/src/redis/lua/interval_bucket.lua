-- TOKEN_BUCKET with interval refill: the twin of interval_bucket.rs, number for number.
--
-- KEYS[1]  the state of one key: a hash with
--            tokens       whole permits, negative while reservations or debts are due
--            last_refill  when the running period began, in microseconds
--            limit        as in bucket.lua, which may have written the state before
--            forgone      as in bucket.lua, in permits
-- ARGV[3]  of the limit: capacity in permits, permits that come back each period, the period in microseconds
--
-- Returns { how many were admitted, now, tokens, frac, last_refill, false, limit }, the fields as they were before, the limit and what
-- precedes it only if it is not the caller's.
local op, own = ARGV[2], ARGV[4]
local capacity, refill, period, position = struct.unpack('>i8i8i8', ARGV[3])
local stored = call('HMGET', KEYS[1], 'tokens', 'frac', 'last_refill', 'limit', 'forgone')
local forgone = stored[5] or ''

-- Permits that were consumed and have no room here: only what would overflow pays for them.
local over = 0
local tokens, last, redated = capacity, now, false
-- What was consumed under another limit: whole permits, those of them that were promised or owed, the time of the state.
local consumed, debt, time
local asked
if stored[4] and stored[4] ~= own then
  local under, permits, rest = string.match(stored[4], '^(%S+) over (%d+) (%d+)$')
  under, over, rest = under or stored[4], whole(permits, 0), whole(rest, 0)
  if under ~= own then
    asked = { capacity, refill, period }
    local a, b, c, d = string.match(under, '^([1-9]%d*)/([1-9]%d*)/([1-9]%d*)/?(%d*)$')
    if d == '' then
      capacity, refill, period = whole(a), whole(b), whole(c)
    else
      -- As bucket.lua does, for which what is lent is an ordinary debit here.
      local tick, unit, flow, size = whole(a), whole(b), whole(c), whole(d)
      local full, now_tick, at = size * unit, floor(now / tick), floor(whole(stored[3]) / tick)
      local fill_ticks = ceil(full / flow)
      local beyond = size + ceil(flow / unit)
      local level = max(-beyond, min(whole(stored[1]), size + beyond)) * unit
      level = max(-full - flow, min(level + max(0, min(whole(stored[2], 0), unit - 1)), full))
      if ARGV[6] then
        local since, lasting = struct.unpack('>i8i8', ARGV[6])
        since = floor(since / tick)
        if at <= since then
          local refilled = since - at >= ceil((full - level) / flow)
          local owed = ceil(min(lasting, fill_ticks * tick) / tick) * flow
          level = max(-full - flow, min(refilled and full or level + (since - at) * flow, -owed))
          at = since
        end
      end
      if at - now_tick > fill_ticks then
        at, level = now_tick, min(level, 0)
      end
      if now_tick > at then
        local paid = max(0, min(now_tick - at, floor(4503599627370496 / flow)) * flow - (full - level))
        local broken = paid % unit > rest and 1 or 0
        over, rest = over - floor(paid / unit) - broken, rest - paid % unit + broken * unit
        if over < 0 then
          over, rest = 0, 0
        end
        level = now_tick - at >= ceil((full - level) / flow) and full or level + (now_tick - at) * flow
        at = now_tick
      end
      -- Rounded up to whole permits.
      consumed = floor((full - level) / unit) + over + ceil(((full - level) % unit + rest) / unit)
      debt, time = ceil(max(0, -level) / unit), at * tick
    end
  end
end
if (stored[1] or stored[3]) and not consumed then
  -- Bounds hold what was not written by us.
  tokens, last = max(-capacity - refill, min(whole(stored[1]), capacity)), whole(stored[3])
end
if ARGV[6] and not consumed then
  local since = struct.unpack('>i8', ARGV[6])
  if not stored[3] or last <= since then
    -- Empty when the server took over, and for the period that begins there.
    local periods = floor((since - last) / period)
    local refilled = not stored[3] or periods >= ceil((capacity - tokens) / refill)
    tokens, last = min(refilled and capacity or tokens + periods * refill, 0), since
  end
end
local horizon
-- Once, or for a state of another limit twice: under that one, and then under the caller's.
repeat
  local former = asked
  horizon = ceil(capacity / refill) * period
  if not consumed then
    if last - now > horizon then
      last, tokens, redated = now, min(tokens, 0), true
    end
    time = max(now, last)
    local periods = floor((time - last) / period)
    over = max(0, over - max(0, min(periods, floor(4503599627370496 / refill)) * refill - (capacity - tokens)))
    if periods >= ceil((capacity - tokens) / refill) then
      -- A full bucket has no phase: the next use starts a period.
      tokens, last = capacity, time
    else
      tokens, last = tokens + periods * refill, last + periods * period
    end
  end
  if former then
    -- What was consumed stays consumed. A denial keeps that, too: it has said how long to wait from now.
    local began = consumed and time or last
    if not consumed then
      consumed, debt = capacity - tokens + over, max(0, -tokens)
    end
    capacity, refill, period = unpack(former)
    -- A period that runs goes on, but does not end before the next microsecond.
    last = max(began, time - period + 1)
    local room = capacity + min(debt, capacity)
    tokens, over = capacity - min(consumed, room), max(0, consumed - room)
    asked, consumed, redated = nil, nil, true
  end
until not former
if redated then
  forgone = ''
end

local admitted, changed = 0, false
if op == 'ask' then
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
        local left = min(tokens, capacity - needed * refill)
        if left < tokens then
          -- Starts that have passed do not matter any longer.
          while tonumber(string.match(forgone, '^ (%d+)') or last + 1) <= last do
            forgone = string.gsub(forgone, '^ %d+ %d+', '')
          end
          forgone = forgone .. string.format(' %.0f %.0f', last + needed * period, tokens - left)
        end
        tokens, admitted, changed = left - cost, admitted + 1, true
      end
    end
  end
  if ARGV[5] and ARGV[5] ~= '' then
    local wanted, parts = struct.unpack('>i8i8', ARGV[5])
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
    local earlier, began, permits = string.match(forgone, '^(.*) (%d+) (%d+)$')
    if earlier and whole(began) == start and tokens + floor((start - last) / period) * refill >= capacity then
      -- Nothing is reserved for this start any longer: what would have overflowed until then can be taken again.
      tokens, forgone = min(capacity, tokens + whole(permits)), earlier
    end
  end
elseif op == 'charge' then
  local cost = struct.unpack('>i8', ARGV[3], position)
  if cost > 0 then
    tokens = max(tokens - min(cost, 2 * capacity), min(tokens, -capacity))
    changed = true
  end
end

if changed then
  local limit = over > 0 and string.format('%s over %.0f 0', own, over) or own
  if stored[4] == limit then
    call('HSET', KEYS[1], 'tokens', tokens, 'last_refill', last)
  else
    call('HSET', KEYS[1], 'tokens', tokens, 'last_refill', last, 'limit', limit)
    if stored[4] then
      -- What only bucket.lua understands.
      call('HDEL', KEYS[1], 'frac', 'leases')
    end
  end
  if tokens >= 0 then
    forgone = ''
  end
  if forgone ~= '' and forgone ~= stored[5] then
    call('HSET', KEYS[1], 'forgone', forgone)
  elseif forgone == '' and stored[5] then
    call('HDEL', KEYS[1], 'forgone')
  end
  if op == 'return' then
    call('HSET', KEYS[1], 'returns', ARGV[5] + 1)
  end
  local full_at = last + ceil((capacity - tokens) / refill) * period
  -- Until what lies over is paid, too: 35 years at most.
  expire(KEYS[1], full_at + min(1125899906842624, ceil(over / refill) * period))
end
if stored[4] and stored[4] ~= own then
  return packed({ admitted, now, stored[1], stored[2], stored[3], false, stored[4] })
end
return packed({ admitted, now, stored[1], stored[2], stored[3] })
