-- FIXED_WINDOW: the twin of fixed_window.rs, number for number.
--
-- KEYS[1]  the state of one key: a hash with
--            window  when the window began, in microseconds
--            count   permits taken; beyond the limit they are promised to the following windows, a limit's worth each
-- ARGV[2]  ask, look, refund or charge
-- ARGV[3]  limit in permits, ARGV[4] the window in microseconds, ARGV[5] 1 if denied requests count
-- ARGV[6]  what is asked, as in bucket.lua
--
-- Returns { how many were admitted, now, window, count }, the fields as they were before.
local op, count_denied = ARGV[2], ARGV[5] == '1'
local limit, length = tonumber(ARGV[3]), tonumber(ARGV[4])
local current = math.floor(now / length)

local stored = redis.call('HMGET', KEYS[1], 'window', 'count')
local window, taken = current, 0
if stored[1] then
  -- Bounds hold what was written under another limit.
  window, taken = math.floor(whole(stored[1]) / length), math.max(0, math.min(whole(stored[2]), 3 * limit))
end

local redated = window > current + 1
if redated then
  window, taken = current, math.max(taken, limit)
end
if current > window then
  if current - window >= math.ceil(taken / limit) then
    taken = 0
  else
    taken = taken - (current - window) * limit
  end
  window = current
end

local admitted, changed = 0, false
if op == 'ask' or op == 'look' then
  for run = 6, #ARGV, 3 do
    local cost, wait, count = tonumber(ARGV[run]), tonumber(ARGV[run + 1]), tonumber(ARGV[run + 2])
    changed = changed or redated and count > 0
    local fit = math.max(0, math.min(count, math.floor((limit - taken) / cost)))
    if fit > 0 then
      taken, admitted, changed = taken + fit * cost, admitted + fit, true
    end
    if fit < count then
      for _ = fit + 1, wait > 0 and count or fit do
        -- A cost is not split over windows: what does not fit into the last promised one goes to the next.
        local position = taken
        if taken % limit + cost > limit then
          position = math.ceil(taken / limit) * limit
        end
        if (window + math.floor(position / limit)) * length - now > math.min(wait, length) then
          break
        end
        taken, admitted, fit, changed = position + cost, admitted + 1, fit + 1, true
      end
      if fit < count and count_denied then
        taken, changed = math.max(taken, limit), true
      end
    end
  end
elseif op == 'refund' then
  local cost, last = math.min(tonumber(ARGV[6]), limit), math.floor((taken - 1) / limit)
  if taken > 0 and cost > 0 and math.floor(tonumber(ARGV[7]) / length) == window + last then
    taken, changed = math.max(taken - cost, last * limit), true
  end
elseif op == 'charge' then
  local cost = tonumber(ARGV[6])
  if cost > 0 then
    taken = math.max(taken, math.min(taken + math.min(cost, 2 * limit), 2 * limit))
    changed = true
  end
end

if changed and op ~= 'look' then
  redis.call('HSET', KEYS[1], 'window', window * length, 'count', taken)
  expire(KEYS[1], (window + math.ceil(taken / limit)) * length)
end
return { admitted, now, stored[1], stored[2] }
