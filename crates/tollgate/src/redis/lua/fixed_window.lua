-- FIXED_WINDOW: the twin of fixed_window.rs, number for number.
--
-- KEYS[1]  the state of one key: a hash with
--            window  when the window began, in microseconds
--            count   permits taken; beyond the limit they are promised to the following windows, a limit's worth each
--            limit   the limit it was written under: limit/length. Behind it, while an earlier limit matters of which more was taken, or
--                    whose window ends later: ' over PERMITS UNTIL', all that was counted, and until when in microseconds
--            forgone while requests wait for the next window: 'START PERMITS', when that begins, and what this one had left when they
--                    skipped it
-- ARGV[3]  of the limit: limit in permits, the window in microseconds, 1 if denied requests count
--
-- Returns { how many were admitted, now, window, count, limit }, the fields as they were before, the limit only if it is not the
-- caller's.
local op, own = ARGV[2], ARGV[4]
local limit, length, count_denied, position = struct.unpack('>i8i8i8', ARGV[3])
local stored = call('HMGET', KEYS[1], 'window', 'count', 'limit', 'forgone')
local forgone = stored[4] or ''
local over, over_until, asked = 0, 0, nil
if stored[3] and stored[3] ~= own then
  local under, permits, rest = string.match(stored[3], '^(%S+) over (%d+) (%d+)$')
  under, over, over_until = under or stored[3], whole(permits, 0), whole(rest, 0)
  if under ~= own then
    asked = { limit, length }
    local a, b = string.match(under, '^([1-9]%d*)/([1-9]%d*)$')
    limit, length = whole(a), whole(b)
  end
end

local window, taken, redated = floor(now / length), 0, false
if stored[1] or stored[2] then
  -- Bounds hold what was not written by us.
  window, taken = floor(whole(stored[1]) / length), max(0, min(whole(stored[2]), 3 * limit))
end
local doubt = ARGV[6] and struct.unpack('>i8', ARGV[6])
-- Once, or for a state of another limit twice: under that one, and then under the caller's.
repeat
  local former, current = asked, floor(now / length)
  if window > current + 1 then
    window, taken, redated = current, max(taken, limit), true
    if not former then
      -- After a clock was set back, what lies over matters for as long as the window does.
      over_until = min(over_until, (current + 1) * length)
    end
  end
  if current > window then
    if current - window >= ceil(taken / limit) then
      taken = 0
    else
      taken = taken - (current - window) * limit
    end
    window = current
  end
  if doubt and window == floor(doubt / length) then
    -- The window in which the server took over has nothing left.
    taken = max(taken, limit)
  end
  if former then
    -- What was counted stays counted. A denial keeps that, too: it has said how long to wait from now.
    local time = max(now, window * length)
    local lying = over_until > time and over or 0
    local used, next_end = max(min(taken, limit), lying), (window + 2) * length
    -- What lies over to the end of the next window has promises of an earlier limit in it.
    local promised = max(taken - min(taken, limit), over_until == next_end and lying or 0)
    local finish = used == 0 and time or promised == 0 and (window + 1) * length or next_end
    if lying > 0 then
      finish = max(finish, over_until)
    end
    limit, length = unpack(former)
    taken = promised > 0 and limit + min(promised, limit) or min(used, limit)
    window = floor(time / length)
    over, over_until = max(used, promised), finish
    if used == 0 or over <= limit and finish <= (window + ceil(taken / limit)) * length then
      over, over_until = 0, 0
    end
    asked, doubt, redated = nil, nil, true
  end
until not former
local settled = taken
if redated then
  forgone = ''
end

local admitted, changed = 0, false
if op == 'ask' then
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
        if from > taken then
          forgone = string.format('%.0f %.0f', (window + 1) * length, from - taken)
        end
        taken, admitted, fit, changed = from + cost, admitted + 1, fit + 1, true
      end
      if fit < count and count_denied == 1 then
        taken, changed, forgone = max(taken, limit), true, ''
      end
    end
  end
  if ARGV[5] and ARGV[5] ~= '' then
    local wanted, parts = struct.unpack('>i8i8', ARGV[5])
    local lent = max(0, min(wanted, ceil((limit - taken) / parts)))
    changed = changed or redated and wanted > 0
    if lent > 0 then
      taken, admitted, changed = taken + lent, admitted + lent, true
    elseif wanted > 0 and count_denied == 1 then
      taken, changed, forgone = max(taken, limit), true, ''
    end
  end
elseif op == 'refund' or op == 'return' then
  local cost, start = struct.unpack('>i8i8', ARGV[3], position)
  local last = floor((taken - 1) / limit)
  if taken > 0 and cost > 0 and floor(start / length) == window + last then
    taken, changed = max(taken - min(cost, limit), last * limit), true
    if forgone ~= '' and taken <= limit then
      -- Nothing is promised to the next window any longer: what was left of this one can be taken again.
      local began, permits = string.match(forgone, '^(%d+) (%d+)$')
      if whole(began) == start and start == (window + 1) * length then
        taken = max(0, taken - whole(permits))
      end
    end
  end
elseif op == 'charge' then
  local cost = struct.unpack('>i8', ARGV[3], position)
  if cost > 0 then
    taken = max(taken, min(taken + min(cost, 2 * limit), 2 * limit))
    changed = true
  end
end

if changed then
  local text = own
  if over_until > max(now, window * length) then
    -- Whatever is counted is also counted there, as long as it matters.
    text = string.format('%s over %.0f %.0f', own, max(0, over + taken - settled), over_until)
  else
    over_until = 0
  end
  if stored[3] == text then
    call('HSET', KEYS[1], 'window', window * length, 'count', taken)
  else
    call('HSET', KEYS[1], 'window', window * length, 'count', taken, 'limit', text)
  end
  if taken <= limit then
    forgone = ''
  end
  if forgone ~= '' and forgone ~= stored[4] then
    call('HSET', KEYS[1], 'forgone', forgone)
  elseif forgone == '' and stored[4] then
    call('HDEL', KEYS[1], 'forgone')
  end
  if op == 'return' then
    call('HSET', KEYS[1], 'returns', ARGV[5] + 1)
  end
  expire(KEYS[1], max((window + ceil(taken / limit)) * length, over_until))
end
if stored[3] and stored[3] ~= own then
  return packed({ admitted, now, stored[1], stored[2], stored[3] })
end
return packed({ admitted, now, stored[1], stored[2] })
