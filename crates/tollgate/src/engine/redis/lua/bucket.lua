-- TOKEN_BUCKET and LEAKY_BUCKET: the twin of token_bucket.rs and leaky_bucket.rs, number for number.
--
-- KEYS[1]  the state of one key: a hash with
--            AMOUNT  whole permits: tokens (negative while reservations or debts are due), or water in the bucket
--            frac    units beyond them, 0 .. unit-1
--            DATED   microseconds, a multiple of tick
-- ARGV[2]  ask, look (ask without writing), refund or charge
-- ARGV[3]  tick in microseconds, ARGV[4] units in a permit, ARGV[5] units that flow in a tick, ARGV[6] size in permits
-- ARGV[7]  1 for a queue, which spaces its callers; else 0
-- ARGV[8]  ask: runs of equal asks, three numbers each: cost (1 .. size), accepted wait in microseconds (-1: none stated), how
--          many. refund: cost, start of the grant. charge: cost
--
-- Returns { how many were admitted, now, AMOUNT, frac, DATED }, the fields as they were before: whoever has them knows every
-- answer of the runs.
local op, queue = ARGV[2], ARGV[7] == '1'
local tick, unit, flow, size = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local full, now_tick = size * unit, math.floor(now / tick)
local fill_ticks = math.ceil(full / flow)

-- The level is what could be taken, in units: tokens, or the room above the water.
local stored = redis.call('HMGET', KEYS[1], AMOUNT, 'frac', DATED)
local level, at = full, now_tick
if stored[1] then
  -- Bounds hold what was written under another limit: debts and reservations reach to a bucketful and a tick below empty.
  local beyond = size + math.ceil(flow / unit)
  local permits = math.max(-beyond, math.min(whole(stored[1]), size + beyond))
  local units = permits * unit + math.max(0, math.min(whole(stored[2], 0), unit - 1))
  level = math.max(-full - flow, math.min(WATER and full - units or units, full))
  at = math.floor(whole(stored[3]) / tick)
end

-- A clock that was set back by more than a horizon: empty, dated now, and kept so even by a denial.
local redated = at - now_tick > fill_ticks
if redated then
  at, level = now_tick, math.min(level, 0)
end
if now_tick > at then
  if now_tick - at >= math.ceil((full - level) / flow) then
    level = full
  else
    level = level + (now_tick - at) * flow
  end
  at = now_tick
end

local admitted, changed = 0, false
if op == 'ask' or op == 'look' then
  for run = 8, #ARGV, 3 do
    local cost, wait, count = tonumber(ARGV[run]) * unit, tonumber(ARGV[run + 1]), tonumber(ARGV[run + 2])
    changed = changed or redated and count > 0
    if queue then
      -- Admitted while there is room, each to start when all that is ahead of it has flowed out.
      local longest = wait < 0 and math.huge or math.min(wait, fill_ticks * tick)
      for _ = 1, count do
        local turn = level == full and 0 or math.max(0, (at + math.ceil((full - level) / flow)) * tick - now)
        if cost > level or turn > longest then
          break
        end
        level, admitted, changed = level - cost, admitted + 1, true
      end
    else
      local fit = math.max(0, math.min(count, math.floor(level / cost)))
      if fit > 0 then
        level, admitted, changed = level - fit * cost, admitted + fit, true
      end
      if wait > 0 then
        for _ = fit + 1, count do
          local ticks = math.ceil((cost - level) / flow)
          if (at + ticks) * tick - now > math.min(wait, fill_ticks * tick) then
            break
          end
          -- The debit falls due at the start of the request, and what flows until then stops at the brim too.
          level, admitted, changed = math.min(level, full - ticks * flow) - cost, admitted + 1, true
        end
      end
    end
  end
elseif op == 'refund' then
  local cost, start = math.min(tonumber(ARGV[8]), size) * unit, math.floor(tonumber(ARGV[9]) / tick)
  local credit = 0
  if queue then
    -- Only the newest, and only if it has not started: nobody behind it moves up unseen.
    local ahead = full - level - cost
    if ahead >= 0 and start > at and start == at + math.ceil(ahead / flow) then
      credit = cost
    end
  elseif start > at then
    if level < 0 and start == at + math.ceil(-level / flow) then
      credit = cost
    end
  elseif level >= 0 and at - start < math.ceil(cost / flow) then
    -- What has flowed back since the start is not owed a second time.
    credit = cost - (at - start) * flow
  end
  if credit > 0 and level < full then
    level, changed = math.min(full, level + credit), true
  end
elseif op == 'charge' then
  local cost = tonumber(ARGV[8])
  if cost > 0 then
    level = math.max(level - math.min(cost, 2 * size) * unit, math.min(level, -full))
    changed = true
  end
end

if changed and op ~= 'look' then
  local units = WATER and full - level or level
  local permits = math.floor(units / unit)
  redis.call('HSET', KEYS[1], AMOUNT, permits, 'frac', units - permits * unit, DATED, at * tick)
  expire(KEYS[1], (at + math.ceil((full - level) / flow)) * tick)
end
return { admitted, now, stored[1], stored[2], stored[3] }
