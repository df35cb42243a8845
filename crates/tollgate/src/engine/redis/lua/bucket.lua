-- TOKEN_BUCKET and LEAKY_BUCKET: the twin of token_bucket.rs and leaky_bucket.rs, number for number.
--
-- KEYS[1]  the state of one key: a hash with
--            AMOUNT  whole permits: tokens (negative while reservations or debts are due), or water in the bucket
--            frac    units beyond them, 0 .. unit-1; absent until it is first above 0
--            DATED   microseconds, a multiple of tick
-- ARGV[3]  of the limit: tick in microseconds, units in a permit, units that flow in a tick, size in permits, 1 for a queue,
--          which spaces its callers
--
-- Returns { how many were admitted, now, AMOUNT, frac, DATED }, the fields as they were before (none: two items): whoever has
-- them knows every answer of the runs.
local op = ARGV[2]
local tick, unit, flow, size, queue, position = struct.unpack('>i8i8i8i8i8', ARGV[3])
local full, now_tick = size * unit, floor(now / tick)
local fill_ticks = ceil(full / flow)

-- The level is what could be taken, in units: tokens, or the room above the water.
local stored = call('HMGET', KEYS[1], AMOUNT, 'frac', DATED)
local level, at, redated = full, now_tick, false
if stored[1] or stored[2] or stored[3] then
  -- Bounds hold what was written under another limit: debts and reservations reach to a bucketful and a tick below empty.
  local beyond = size + ceil(flow / unit)
  local permits = max(-beyond, min(whole(stored[1]), size + beyond))
  local units = permits * unit + max(0, min(whole(stored[2], 0), unit - 1))
  level = max(-full - flow, min(WATER and full - units or units, full))
  at = floor(whole(stored[3]) / tick)
  if now_tick > at then
    level = now_tick - at >= ceil((full - level) / flow) and full or level + (now_tick - at) * flow
    at = now_tick
  elseif at - now_tick > fill_ticks then
    -- A clock that was set back by more than a horizon: empty, dated now, and kept so even by a denial.
    at, level, redated = now_tick, min(level, 0), true
  end
end

local admitted, changed = 0, false
if op == 'ask' or op == 'look' then
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
          local ticks = ceil((cost - level) / flow)
          if (at + ticks) * tick - now > min(wait, fill_ticks * tick) then
            break
          end
          -- The debit falls due at the start of the request, and what flows until then stops at the brim too.
          level, admitted, changed = min(level, full - ticks * flow) - cost, admitted + 1, true
        end
      end
    end
  end
elseif op == 'refund' then
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
  if credit > 0 and level < full then
    level, changed = min(full, level + credit), true
  end
elseif op == 'charge' then
  local cost = struct.unpack('>i8', ARGV[3], position)
  if cost > 0 then
    level = max(level - min(cost, 2 * size) * unit, min(level, -full))
    changed = true
  end
end

if changed and op ~= 'look' then
  local units = WATER and full - level or level
  local permits = floor(units / unit)
  if units == permits * unit and not stored[2] then
    call('HSET', KEYS[1], AMOUNT, permits, DATED, at * tick)
  else
    call('HSET', KEYS[1], AMOUNT, permits, 'frac', units - permits * unit, DATED, at * tick)
  end
  expire(KEYS[1], (at + ceil((full - level) / flow)) * tick)
end
if not stored[1] then
  return { admitted, now }
end
return { admitted, now, stored[1], stored[2], stored[3] }
