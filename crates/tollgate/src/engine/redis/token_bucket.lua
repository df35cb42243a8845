-- TOKEN_BUCKET in Redis: the twin of tollgate-core's token_bucket.rs, number for number.
--
-- KEYS[1]  the state of one key: a hash with
--            tokens       whole permits, negative while reservations or debts are due
--            frac         units beyond them, 0 .. unit-1
--            last_refill  microseconds, a multiple of tick
-- ARGV[1]  now in microseconds, or '' for the server's own time
-- ARGV[2]  what to do: decide | peek | refund | charge
-- ARGV[3]  cost in permits, at most 2^51
-- ARGV[4]  wait in microseconds that the caller accepts (decide, peek); start of the grant (refund)
-- ARGV[5]  tick in microseconds, ARGV[6] units in a permit, ARGV[7] units that flow in a tick, ARGV[8] capacity in permits
--
-- Returns { admitted (1, 0, or -1 for never), delay, retry, remaining, reset, ttl }, times in microseconds, ttl in
-- milliseconds (0: nothing was written). Every number is an integer below 2^53, exact in a double.
local now
if ARGV[1] == '' then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000000 + tonumber(time[2])
else
  now = tonumber(ARGV[1])
end
local op, cost, wait = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local tick, unit, flow, capacity = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local full = capacity * unit
local fill_ticks = math.ceil(full / flow)
local now_tick = math.floor(now / tick)

local state = redis.call('HMGET', KEYS[1], 'tokens', 'frac', 'last_refill')
local level, at, dirty = full, now_tick, false
if state[1] then
  level = tonumber(state[1]) * unit + tonumber(state[2])
  at = tonumber(state[3]) / tick
end

-- A clock that was set back by more than a horizon: empty, dated now, and kept so even by a denial.
if at - now_tick > fill_ticks then
  at, level, dirty = now_tick, math.min(level, 0), true
end
if now_tick > at then
  if now_tick - at >= math.ceil((full - level) / flow) then
    level = full
  else
    level = level + (now_tick - at) * flow
  end
  at = now_tick
end

local admitted, delay, retry, write = 0, 0, 0, false
local before = level
if op == 'decide' or op == 'peek' then
  if cost > capacity then
    admitted, dirty = -1, false
  elseif cost == 0 then
    admitted, dirty = 1, false
  else
    local need = cost * unit - level
    local ticks = math.ceil(need / flow)
    local until_start = (at + ticks) * tick - now
    if need <= 0 then
      admitted, write = 1, true
      level = level - cost * unit
    elseif until_start <= math.min(wait, fill_ticks * tick) then
      admitted, delay, write = 1, until_start, true
      level = math.min(level, full - ticks * flow) - cost * unit
    else
      retry = until_start - math.min(wait, fill_ticks * tick)
    end
  end
elseif op == 'refund' then
  local units, start, credit = math.min(cost, capacity) * unit, math.floor(wait / tick), 0
  if start > at then
    if level < 0 and start == at + math.ceil(-level / flow) then
      credit = units
    end
  elseif level >= 0 and at - start < math.ceil(units / flow) then
    credit = units - (at - start) * flow
  end
  admitted, dirty = 1, false
  if credit > 0 and level < full then
    level, write = math.min(full, level + credit), true
  end
elseif op == 'charge' then
  admitted, dirty = 1, false
  if cost > 0 then
    level = math.max(level - math.min(cost, 2 * capacity) * unit, math.min(level, -full))
    write = true
  end
else
  return redis.error_reply('ERR unknown operation ' .. op)
end

local ttl = 0
if op == 'peek' then
  level = before
elseif write or dirty then
  local full_at = (at + math.ceil((full - level) / flow)) * tick
  -- A second more than needed covers the server's own, coarser clock of expiries.
  ttl = math.ceil(math.max(0, full_at - now) / 1000) + 1000
  local tokens = math.floor(level / unit)
  redis.call('HSET', KEYS[1], 'tokens', string.format('%.0f', tokens), 'frac', string.format('%.0f', level - tokens * unit),
    'last_refill', string.format('%.0f', at * tick))
  redis.call('PEXPIRE', KEYS[1], string.format('%.0f', ttl))
end

local remaining = math.max(0, math.floor(level / unit))
local reset = 0
if level < full then
  reset = math.max(0, (at + math.ceil((full - level) / flow)) * tick - now)
end
return { admitted, delay, retry, remaining, reset, ttl }
