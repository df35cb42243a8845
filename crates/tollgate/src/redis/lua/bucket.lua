-- TOKEN_BUCKET and LEAKY_BUCKET: the twin of token_bucket.rs, leaky_bucket.rs and lease_bucket.rs, number for number.
--
-- KEYS[1]  the state of one key: a hash with
--            AMOUNT   whole permits: tokens (negative while reservations or debts are due), or water in the bucket
--            frac     units beyond them, 0 .. unit-1; absent until it is first above 0
--            DATED    microseconds, a multiple of tick
--            leases   while permits are out: how long a lease lives, when the epoch began in which the following were lent (both
--                     in microseconds), permits lent in it, permits lent in the one before
--            returns  how often something was given back
--            limit    the limit it was written under: tick/unit/flow/size, or size/refill/period of interval refill. Behind it, if more
--                     was consumed under earlier limits than this one holds: ' over PERMITS UNITS'
--            forgone  while requests wait: ' START UNITS' for each start of which requests have taken more than their costs, since what
--                     flows until then would overflow, the latest last
-- ARGV[3]  of the limit: tick in microseconds, units in a permit, units that flow in a tick, size in permits, 1 for a queue,
--          which spaces its callers and does not lend
--
-- Returns { how many were admitted or lent, now, AMOUNT, frac, DATED, leases, limit }, the fields as they were before (none: two
-- items; the limit only if it is not the caller's): whoever has them knows every answer of the runs.
local op, own = ARGV[2], ARGV[4]
local tick, unit, flow, size, queue, position = struct.unpack('>i8i8i8i8i8', ARGV[3])
local stored = call('HMGET', KEYS[1], AMOUNT, 'frac', DATED, 'leases', 'limit', 'forgone')
local forgone = stored[6] or ''

-- What was consumed and has no room here: permits, and units beyond them. Only what would overflow pays for it.
local over, over_rest = 0, 0
-- Of a state that was written under another limit: the caller's own numbers, until it is carried over; refill and period, if it had those.
local asked, came, period
if stored[5] and stored[5] ~= own then
  local under, permits, rest = string.match(stored[5], '^(%S+) over (%d+) (%d+)$')
  under, over, over_rest = under or stored[5], whole(permits, 0), whole(rest, 0)
  if under ~= own then
    asked = { tick, unit, flow, size }
    local a, b, c, d = string.match(under, '^([1-9]%d*)/([1-9]%d*)/([1-9]%d*)/?(%d*)$')
    if d == '' then
      tick, unit, flow, size, came, period = 1, 1, 1, whole(a), whole(b), whole(c)
    else
      tick, unit, flow, size = whole(a), whole(b), whole(c), whole(d)
    end
  end
end
local full, now_tick = size * unit, floor(now / tick)
local fill_ticks = ceil(full / flow)

-- The level is what could be taken, in units: tokens, or the room above the water.
local level, at, redated = full, now_tick, false
-- An epoch is as long as a lease lives. What is out was lent in this one or in the one before.
local life, epoch, out, before = 1, 0, 0, 0

-- Only where permits are out: functions that are not called would take a tenth of the whole time to be made.
local refill, next_epoch, when_left
if (stored[4] or ARGV[5] and ARGV[5] ~= '') and queue == 0 then
  -- What flows finds so much less room as is out.
  refill = function(to)
    local missing = full - min(out + before, size) * unit - level
    if to > at and missing > 0 then
      level = to - at >= ceil(missing / flow) and level + missing or level + (to - at) * flow
    end
    at = max(at, to)
  end

  -- To the end of the epoch: only there are the leases of the one before surely over.
  next_epoch = function()
    refill((epoch + 1) * life)
    -- What was out beyond what the bucket holds has taken no room here, and lies over now.
    over = over + before - (min(out + before, size) - min(out, size))
    epoch, out, before = epoch + 1, 0, out
  end

  -- The first tick at which so many units are left, and how many are left then.
  when_left = function(units)
    local state = { level, at, epoch, out, before, over }
    local start
    repeat
      start = at + max(0, ceil((units - level) / flow))
      local fits = units <= full - min(out + before, size) * unit and start <= (epoch + 1) * life
      if out + before > 0 and not fits then
        next_epoch()
        start = nil
      end
    until start
    refill(start)
    local left = level
    level, at, epoch, out, before, over = unpack(state)
    return start, left
  end
end

if stored[1] or stored[2] or stored[3] then
  -- Bounds hold what was not written by us: debts and reservations reach to a bucketful and a tick below empty.
  local beyond = size + ceil((came or flow) / unit)
  local permits = max(-beyond, min(whole(stored[1]), size + beyond))
  local units = permits * unit + (period and 0 or max(0, min(whole(stored[2], 0), unit - 1)))
  level = max(-full - (came or flow), min(WATER and full - units or units, full))
  at = floor(whole(stored[3]) / tick)
  if stored[4] and queue == 0 and not period then
    local lasting, since, lent, earlier = string.match(stored[4], '^(%d+) (%d+) (%d+) (%d+)$')
    life = max(1, ceil(whole(lasting) / tick))
    epoch = ceil(ceil(whole(since) / tick) / life)
    out, before = whole(lent), whole(earlier)
  end
end
if ARGV[6] then
  local since, lasting = struct.unpack('>i8i8', ARGV[6])
  since = floor(since / tick)
  if period and at <= since then
    -- Empty when the server took over, and for the period that begins there.
    local periods = floor((since - at) / period)
    level, at = min(periods >= ceil((full - level) / came) and full or level + periods * came, 0), since
  elseif not period and (not stored[3] or at <= since) then
    -- Empty when the server took over, and what flows while lost leases may be spent is owed.
    local refilled = not stored[3] or since - at >= ceil((full - level) / flow)
    local owed = ceil(min(lasting, fill_ticks * tick) / tick) * flow
    level = max(-full - flow, min(refilled and full or level + (since - at) * flow, -owed))
    at = since
  end
end
-- Once, or for a state of another limit twice: under that one, and then under the caller's.
repeat
  local former = asked
  if period then
    -- As interval_bucket.lua does.
    if at - now > ceil(size / came) * period then
      at, level = now, min(level, 0)
    end
    now_tick = max(now, at)
    local periods = floor((now_tick - at) / period)
    over = max(0, over - max(0, min(periods, floor(4503599627370496 / came)) * came - (full - level)))
    level, at = periods >= ceil((full - level) / came) and full or level + periods * came, now_tick
  else
    if at - now_tick > fill_ticks then
      -- A clock that was set back by more than a horizon: empty, dated now, and kept so even by a denial.
      at, level, redated = now_tick, min(level, 0), true
    end
    if out + before > 0 then
      local current = floor(now_tick / life)
      if current < epoch then
        -- A clock that was set back: all that is out counts as lent now.
        epoch, out, before, redated = current, out + before, 0, true
      end
      while epoch < current and out + before > 0 do
        next_epoch()
      end
      epoch = current
      refill(now_tick)
    elseif now_tick > at then
      if over + over_rest > 0 then
        local paid = max(0, min(now_tick - at, floor(4503599627370496 / flow)) * flow - (full - level))
        local permits, rest = floor(paid / unit), paid % unit
        local broken = rest > over_rest and 1 or 0
        over, over_rest = over - permits - broken, over_rest - rest + broken * unit
        if over < 0 then
          over, over_rest = 0, 0
        end
      end
      level = now_tick - at >= ceil((full - level) / flow) and full or level + (now_tick - at) * flow
      at = now_tick
    end
  end
  if former then
    -- What was consumed stays consumed, and what is out stays out. A denial keeps that, too: it has said how long to wait from now.
    local used = max(0, full - min(out + before, size) * unit - level)
    local permits, rest, debt = floor(used / unit) + over, used % unit + over_rest, ceil(max(0, -level) / unit)
    if rest >= unit then
      permits, rest = permits + 1, rest - unit
    end
    local time, lasting, since, from = at * tick, life * tick, epoch * life * tick, unit
    tick, unit, flow, size = unpack(former)
    full, now_tick, fill_ticks = size * unit, floor(now / tick), ceil(size * unit / flow)
    if rest > 0 and from ~= unit then
      -- Rounded up, by what is missing to a permit; factors of 26 bits, whose product is exact.
      local coarse, fine = ceil(from / 67108864), ceil(unit / 67108864)
      rest = unit - floor(floor((from - rest) / coarse) * floor(unit / fine) / ceil(from / coarse)) * fine
      if rest == unit then
        permits, rest = permits + 1, 0
      end
    end
    local home = size - min(out + before, size)
    local room = home + min(debt, size)
    over, over_rest = 0, 0
    if permits >= room then
      over, over_rest, permits, rest = permits - room, rest, room, 0
    end
    local is_full = permits + rest == 0 and over + over_rest == 0 and out + before == 0
    level, at = home * unit - permits * unit - rest, is_full and floor(time / tick) or ceil(time / tick)
    life = max(1, ceil(lasting / tick))
    epoch = ceil(ceil(since / tick) / life)
    asked, period, redated = nil, nil, true
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
    cost = cost * unit
    changed = changed or redated and count > 0
    if queue == 1 then
      -- Admitted while there is room, each to start when all that is ahead of it has flowed out.
      local longest = wait < 0 and math.huge or min(wait, fill_ticks * tick)
      for _ = 1, count do
        local turn = level == full and 0 or max(0, (at + ceil((full - level) / flow)) * tick - now)
        if cost > level or turn > longest then
          break
        end
        level, admitted, changed = level - cost, admitted + 1, true
      end
    else
      local fit = max(0, min(count, floor(level / cost)))
      if fit > 0 then
        level, admitted, changed = level - fit * cost, admitted + fit, true
      end
      if wait > 0 then
        for _ = fit + 1, count do
          local start, left
          if when_left then
            start, left = when_left(cost)
          else
            start = at + ceil((cost - level) / flow)
            left = min(full, level + (start - at) * flow)
          end
          if start * tick - now > min(wait, fill_ticks * tick) then
            break
          end
          -- The debit falls due at the start of the request, and what flows until then stops at the brim too.
          left = left - (start - at) * flow
          if left < level and not stored[4] then
            -- Starts that have passed do not matter any longer.
            while tonumber(string.match(forgone, '^ (%d+)') or at * tick + 1) <= at * tick do
              forgone = string.gsub(forgone, '^ %d+ %d+', '')
            end
            forgone = forgone .. string.format(' %.0f %.0f', start * tick, level - left)
          end
          level, admitted, changed = left - cost, admitted + 1, true
        end
      end
    end
  end
  if ARGV[5] and ARGV[5] ~= '' then
    local wanted, parts, lasting = struct.unpack('>i8i8i8', ARGV[5])
    local lent = max(0, min(wanted, ceil(floor(level / unit) / parts)))
    changed = changed or redated and wanted > 0
    if lent > 0 then
      level, admitted, changed = level - lent * unit, admitted + lent, true
      if lasting > 0 then
        lasting = max(1, floor(lasting / tick))
        if out + before == 0 or lasting > life then
          -- Those that are out live less long: as if they were lent now, they count for long enough.
          life, epoch, out, before = lasting, floor(now_tick / lasting), out + before, 0
        end
        out = out + lent
      end
    end
  end
elseif op == 'refund' or op == 'return' and struct.unpack('>i8', ARGV[3], position + 16) == 0 then
  -- What was lent and not counted as out was taken like any other.
  local cost, start = struct.unpack('>i8i8', ARGV[3], position)
  local credit = 0
  cost, start = min(cost, size) * unit, floor(start / tick)
  if queue == 1 then
    -- Only the newest, and only if it has not started: nobody behind it moves up unseen.
    local ahead = full - level - cost
    if ahead >= 0 and start > at and start == at + ceil(ahead / flow) then
      credit = cost
    end
  elseif start > at then
    if level < 0 and start == at + ceil(-level / flow) then
      credit = cost
    end
  elseif level >= 0 and at - start < ceil(cost / flow) then
    -- What has flowed back since the start is not owed a second time.
    credit = cost - (at - start) * flow
  end
  local cap = full - min(out + before, size) * unit
  if credit > 0 and level < cap then
    level, changed = min(cap, level + credit), true
    local earlier, began, units = string.match(forgone, '^(.*) (%d+) (%d+)$')
    if earlier and whole(began) == start * tick and level + (start - at) * flow >= full then
      -- Nothing is reserved for this start any longer: what would have overflowed until then can be taken again.
      level, forgone = min(cap, level + whole(units)), earlier
    end
  end
elseif op == 'return' then
  local permits, since = struct.unpack('>i8i8', ARGV[3], position)
  permits = min(permits, out + before)
  if permits > 0 and floor(floor(since / tick) / life) >= epoch - 1 then
    -- From the earlier ones first, whichever it was: then the others count for too long, never for too short.
    local early = min(permits, before)
    out, before, changed = out - (permits - early), before - early, true
    -- While somebody waits for a start that was promised, only room comes back. Under a limit that was made smaller meanwhile, no
    -- more than there is room for.
    if level >= 0 then
      level = max(level, min(level + min(permits, size) * unit, full - min(out + before, size) * unit))
    end
  end
elseif op == 'charge' then
  local cost = struct.unpack('>i8', ARGV[3], position)
  if cost > 0 then
    level = max(level - min(cost, 2 * size) * unit, min(level, -full))
    changed = true
  end
end

if changed then
  local units = WATER and full - level or level
  local permits = floor(units / unit)
  local frac, limit = units - permits * unit, own
  if over + over_rest > 0 then
    limit = string.format('%s over %.0f %.0f', own, over, over_rest)
  end
  if stored[5] == limit and frac == 0 and not stored[2] then
    call('HSET', KEYS[1], AMOUNT, permits, DATED, at * tick)
  elseif stored[5] == limit then
    call('HSET', KEYS[1], AMOUNT, permits, 'frac', frac, DATED, at * tick)
  elseif frac == 0 and not stored[2] then
    call('HSET', KEYS[1], AMOUNT, permits, DATED, at * tick, 'limit', limit)
  else
    call('HSET', KEYS[1], AMOUNT, permits, 'frac', frac, DATED, at * tick, 'limit', limit)
  end
  if out + before > 0 then
    local leases = string.format('%.0f %.0f %.0f %.0f', life * tick, epoch * life * tick, out, before)
    call('HSET', KEYS[1], 'leases', leases)
  elseif stored[4] then
    call('HDEL', KEYS[1], 'leases')
  end
  if level >= 0 or stored[4] then
    forgone = ''
  end
  if forgone ~= '' and forgone ~= stored[6] then
    call('HSET', KEYS[1], 'forgone', forgone)
  elseif forgone == '' and stored[6] then
    call('HDEL', KEYS[1], 'forgone')
  end
  if op == 'return' then
    call('HSET', KEYS[1], 'returns', ARGV[5] + 1)
  end
  local full_at = (when_left and when_left(full) or at + ceil((full - level) / flow)) * tick
  if over + over_rest > 0 then
    -- Until that is paid, too: 35 years at most.
    full_at = full_at + min(1125899906842624, ceil((over * unit + over_rest) / flow) * tick)
  end
  expire(KEYS[1], full_at)
end
if not stored[1] then
  return packed({ admitted, now })
end
if stored[5] and stored[5] ~= own then
  return packed({ admitted, now, stored[1], stored[2], stored[3], stored[4], stored[5] })
end
return packed({ admitted, now, stored[1], stored[2], stored[3], stored[4] or nil })
