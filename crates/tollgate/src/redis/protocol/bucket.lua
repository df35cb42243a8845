-- TOKEN_BUCKET and LEAKY_BUCKET: the twin of token_bucket.rs and leaky_bucket.rs. AMOUNT, DATED and WATER differ.
--
-- A hash with
--   AMOUNT   whole permits: tokens (negative while reservations or debts are due), or water in the bucket
--   DATED    microseconds, a multiple of the tick
--   frac     units beyond the whole permits, 0 .. unit-1; absent until it is first above 0
--   limit    the limit that it was written under: tick/unit/flow/size; a suffix marks a state that is not plain
--   leases   while permits are lent (lend.lua)
-- Numbers of the limit: tick in microseconds, units in a permit, units that flow in a tick, size in permits, 1 for a queue.
-- @read
local tick, unit, flow, size, queue, since
own, tick, unit, flow, size, queue, since, cost, wait, count, parts, position =
  struct.unpack('>I4c0dddddddddd', numbers, position)
local full, at = size * unit, (now - now % tick) / tick
-- The level is the number of units that could be taken: tokens, or the room above the water.
local level = full
local stored = call('HMGET', key, AMOUNT, DATED, 'limit', 'frac', 'leases')
if stored[3] == own and not stored[5] then
  local dated = floor(stored[2] / tick)
  level = stored[1] * unit + (stored[4] or 0)
  if WATER then
    level = full - level
  end
  if not (dated * tick > since and dated - at <= ceil(full / flow) and level <= full and level >= -full - flow) then
    @rare
  end
  if at > dated then
    level = level + (at - dated) * flow
    if level > full then
      level = full
    end
  else
    at = dated
  end
elseif stored[1] or stored[2] or stored[3] or since > 0 then
  @rare
end
-- @reply
struct.pack('>dd', level, at)
-- @fit
local units = cost * unit
if queue == 1 then
  -- A request starts when all water ahead of it has flowed out. Requests are admitted while there is room and the wait is accepted.
  fit = floor(level / units)
  if wait >= 0 then
    local water = full - level
    local flows = (floor((now + wait) / tick) - at) * flow
    fit = min(fit, max(water == 0 and 1 or 0, floor((flows - water) / units) + 1))
  end
else
  fit = floor(level / units)
  if fit < count and wait > 0 then
    -- The flow until the start of the last request can be reserved now, unless it would overflow.
    if units + flow - 1 > full then
      @rare
    end
    fit = floor((level + max(0, floor((now + wait) / tick) - at) * flow) / units)
  end
end
-- @spend
level = level - n * units
-- @refund
local units, start = cost * unit, floor(wait / tick)
if queue == 1 or start > at or level < 0 then
  @rare
end
-- Permits that have flowed back since the start are not given back a second time.
local credit = units - (at - start) * flow
if credit > 0 and level < full then
  level, changed = min(full, level + credit), true
end
-- @write
local amount = WATER and full - level or level
local frac = amount % unit
local permits, dated = (amount - frac) / unit, at * tick
if dated == now then
  dated = now_text
end
if frac > 0 or stored[4] then
  call('HSET', key, AMOUNT, permits, DATED, dated, 'limit', own, 'frac', frac)
elseif stored[3] then
  call('HSET', key, AMOUNT, permits, DATED, dated)
else
  call('HSET', key, AMOUNT, permits, DATED, dated, 'limit', own)
end
@expire((at + ceil((full - level) / flow)) * tick)
