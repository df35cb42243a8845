-- Lends permits of a bucket and counts them as out: the twin of lease_bucket.rs. Fields and numbers are those of bucket.lua, and
--
--   leases  while permits are out: how long a lease lives, when the epoch began in which the following were lent (both in
--           microseconds), permits lent in it, permits lent in the one before. An epoch is as long as a lease lives
-- ARGV[1]  ends with three numbers: how many permits are wanted, into how many parts the free permits are divided, of which one is lent,
--          and how long they are lent for, in microseconds
--
-- Returns numbers: how many were admitted or lent, now, and the state before: level and its tick; length and number of the epoch, permits
-- lent in it and in the one before.
@time
local key, numbers = KEYS[1], ARGV[1]
local own, tick, unit, flow, size, _, since, position = struct.unpack('>I4c0dddddd', numbers)
local steps_end = #numbers - 24
local wanted, parts, lasting = struct.unpack('>ddd', numbers, steps_end + 1)
local full, now_tick = size * unit, floor(now / tick)
local level, at, life, epoch, out, before = full, now_tick, 1, now_tick, 0, 0
local stored = call('HMGET', key, AMOUNT, DATED, 'limit', 'frac', 'leases')
if stored[3] == own then
  level, at = stored[1] * unit + (stored[4] or 0), floor(stored[2] / tick)
  if WATER then
    level = full - level
  end
  if stored[5] then
    local lives, began, lent, earlier = string.match(stored[5], '^(%d+) (%d+) (%d+) (%d+)$')
    life = max(1, ceil(lives / tick))
    epoch, out, before = ceil(ceil(began / tick) / life), lent + 0, earlier + 0
  end
  if not (at * tick > since and at - now_tick <= ceil(full / flow) and level <= full and level >= -full - flow and
    out + before <= size and life <= 4503599627370496 and epoch <= floor(now_tick / life)) then
    @rare
  end
elseif stored[1] or stored[2] or stored[3] or since > 0 then
  @rare
end

-- Permits that are out take room in the bucket.
local function refill(to)
  if to > at then
    level, at = level + max(0, min(full - (out + before) * unit - level, (to - at) * flow)), to
  end
end
-- Advances to the end of the epoch. Only then have the leases of the epoch before surely ended.
local function next_epoch()
  refill((epoch + 1) * life)
  epoch, out, before = epoch + 1, 0, out
end
while epoch < floor(now_tick / life) and out + before > 0 do
  next_epoch()
end
epoch = floor(now_tick / life)
refill(now_tick)
local reply = struct.pack('>dddddd', level, at, life, epoch, out, before)

local admitted = 0
while position <= steps_end do
  local cost, wait, count
  cost, wait, count, _, position = struct.unpack('>dddd', numbers, position)
  local fit = max(0, min(count, floor(level / (cost * unit))))
  if fit < count and wait > 0 then
    @rare
  end
  level, admitted = level - fit * cost * unit, admitted + fit
end
local lent = max(0, min(wanted, ceil(floor(level / unit) / parts)))
if lent > 0 then
  lasting = max(1, floor(lasting / tick))
  if out + before == 0 or lasting > life then
    -- The leases that are out have a shorter life. Counted as lent now, they count for long enough.
    life, epoch, out, before = lasting, floor(now_tick / lasting), out + before, 0
  end
  level, out = level - lent * unit, out + lent
end
if admitted + lent > 0 then
  local amount = WATER and full - level or level
  local permits, dated = floor(amount / unit), at * tick
  local leases = out + before > 0
    and string.format('%.0f %.0f %.0f %.0f', life * tick, epoch * life * tick, out, before)
  -- The state matters until all leases are over and the bucket is full.
  while out + before > 0 do
    next_epoch()
  end
  call('HSET', key, AMOUNT, permits, DATED, dated, 'limit', own, 'frac', amount - permits * unit)
  if leases then
    call('HSET', key, 'leases', leases)
  elseif stored[5] then
    call('HDEL', key, 'leases')
  end
  @expire((at + ceil((full - level) / flow)) * tick)
end
return struct.pack('>dd', admitted + lent, now) .. reply
