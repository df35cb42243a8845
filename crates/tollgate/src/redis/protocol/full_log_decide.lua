-- Follows full_log_state.lua: takes the steps one after another. full_log_save.lua writes.
local popped
local admitted, changed, reply = 0, false, { time, used, oldest, earliest }
while position <= #numbers do
  local permits, wait, asked, _
  permits, wait, asked, _, position = struct.unpack('>dddd', numbers, position)
  if asked == -2 then
    permits = min(permits, 2 * limit - used)
    if permits > 0 then
      add(earliest, permits)
    end
    changed = permits > 0 or redated
  elseif asked == -1 then
    changed = redated and permits > 0
    if permits > 0 and used > 0 and wait > time - length then
      changed = true
      if last.start == wait then
        local less = min(permits, last.cost)
        last.sum, last.cost, held = apart(last.sum, less), last.cost - less, held - less
        if last.cost == 0 and held > 0 then
          popped = last.member
          local start, sum, cost = entry(-2)
          last = { start = start, sum = sum, cost = cost, member = call('ZRANGE', key, -2, -2)[1] }
          entries = { last }
        end
      else
        -- The younger entries stay, so a refund frees no more than the true history would.
        held = held - min(permits, held)
      end
      last.cost, last.changed = min(last.cost, held), true
      if held == 0 then
        -- A log without permits keeps the time, and delays no request.
        last.start, fresh, entries = time, true, { last }
      end
    end
  else
    changed = changed or redated and asked > 0
    local header, left = #reply + 1, asked
    reply[header] = 0
    -- The next `many` asks of this run have this start.
    local function answer(many, start)
      reply[header], reply[#reply + 1], reply[#reply + 2] = reply[header] + 1, many, start
      left = left - many
    end
    local fit = earliest == time and min(asked, floor((limit - used) / permits)) or 0
    if fit > 0 then
      add(time, fit * permits)
      answer(fit, time)
      admitted, changed = admitted + fit, true
    elseif asked == 0 then
      answer(0, start_of(permits))
    end
    while left > 0 do
      local start = start_of(permits)
      if start == time or start - now <= max(0, min(wait, length)) then
        add(start, permits)
        answer(1, start)
        admitted, changed = admitted + 1, true
      elseif counts_denied == 1 and earliest == time and used < limit then
        answer(1, start)
        add(time, min(permits, limit - used))
        changed = true
      else
        answer(left, start)
      end
    end
  end
end
