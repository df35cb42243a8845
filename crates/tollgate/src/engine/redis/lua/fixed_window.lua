-- FIXED_WINDOW: the twin of fixed_window.rs, number for number.
--
-- KEYS[1]  the state of one key: a hash with
--            window  when the window began, in microseconds
--            count   permits taken; beyond the limit they are promised to the following windows, a limit's worth each
-- ARGV[3]  of the limit: limit in permits, the window in microseconds, 1 if denied requests count
--
-- Returns { how many were admitted, now, window, count }, the fields as they were before.
local op = ARGV[2]
local limit, length, count_denied, position = struct.unpack('>i8i8i8', ARGV[3])
local current = floor(now / length)

local stored = call('HMGET', KEYS[1], 'window', 'count')
local window, taken = current, 0
if stored[1] or stored[2] then
  -- Bounds hold what was written under another limit.
  window, taken = floor(whole(stored[1]) / length), max(0, min(whole(stored[2]), 3 * limit))
end

local redated = window > current + 1
if redated then
  window, taken = current, max(taken, limit)
end
if current > window then
  if current - window >= ceil(taken / limit) then
    taken = 0
  else
    taken = taken - (current - window) * limit
  end
  window = current
end

if ARGV[5] and window == floor(struct.unpack('>i8', ARGV[5]) / length) then
  -- The window in which the server took over has nothing left.
  taken = max(taken, limit)
end

local admitted, changed = 0, false
if op == 'ask' or op == 'look' then
  while position <= #ARGV[3] do
    local cost, wait, count
    cost, wait, count, position = struct.unpack('>i8i8i8', ARGV[3], position)
    changed = changed or redated and count > 0
    local fit = max(0, min(count, floor((limit - taken) / cost)))
    if fit > 0 then
      taken, admitted, changed = taken + fit * cost, admitted + fit, true
    end
    if fit < count then
      for _ = fit + 1, wait > 0 and count or fit do
        -- A cost is not split over windows: what does not fit into the last promised one goes to the next.
        local from = taken
        if taken % limit + cost > limit then
          from = ceil(taken / limit) * limit
        end
        if (window + floor(from / limit)) * length - now > min(wait, length) then
          break
        end
        taken, admitted, fit, changed = from + cost, admitted + 1, fit + 1, true
      end
      if fit < count and count_denied == 1 then
        taken, changed = max(taken, limit), true
      end
    end
  end
  if ARGV[4] and ARGV[4] ~= '' then
    local wanted, parts = struct.unpack('>i8i8', ARGV[4])
    local lent = max(0, min(wanted, ceil((limit - taken) / parts)))
    changed = changed or redated and wanted > 0
    if lent > 0 then
      taken, admitted, changed = taken + lent, admitted + lent, true
    elseif wanted > 0 and count_denied == 1 then
      taken, changed = max(taken, limit), true
    end
  end
elseif op == 'refund' or op == 'return' then
  local cost, start = struct.unpack('>i8i8', ARGV[3], position)
  local last = floor((taken - 1) / limit)
  if taken > 0 and cost > 0 and floor(start / length) == window + last then
    taken, changed = max(taken - min(cost, limit), last * limit), true
  end
elseif op == 'charge' then
  local cost = struct.unpack('>i8', ARGV[3], position)
  if cost > 0 then
    taken = max(taken, min(taken + min(cost, 2 * limit), 2 * limit))
    changed = true
  end
end

if changed and op ~= 'look' then
  call('HSET', KEYS[1], 'window', window * length, 'count', taken)
  if op == 'return' then
    call('HSET', KEYS[1], 'returns', ARGV[4] + 1)
  end
  expire(KEYS[1], (window + ceil(taken / limit)) * length)
end
return { admitted, now, stored[1], stored[2] }
