-- Sets of limits: of each set all limits are taken, or none. `@name` stands for sections of the algorithms' files, as in single.lua.
--
-- KEYS     the states: first the one that all sets have in common, if there is one; then the others of each group of equal sets
-- ARGV[1]  a byte: how many states are common to all sets (0 or 1), and one: how many groups there are; for each group two numbers of four
--          bytes: how many equal sets it has, and how many states of its own. Then for each state
--            a byte for its algorithm, and one that is 1 if its denial binds the set
--            its limit and one step, how many sets ask, as in single.lua (a log beside states that were computed: as in set_full_log.lua)
--          or, if the caller has computed the state (byte 0, or 8: then it is not marked if it has changed), numbers of eight bytes: how
--            many sets take from it, milliseconds to live (0: nothing is written), how many texts follow of fields to set with their values;
--            then the fields that it was computed from, how many texts follow of fields to remove, and the texts
--
-- Returns numbers: 0, now, how many sets of each group were taken, and the states before. If a state is not plain, or is not the one that
-- the caller has computed from, nothing is taken: -1, now, and the fields of all states that are hashes.
@time
local numbers, call_groups, position = ARGV[1], nil, nil
-- By group, the first of which is the common state: the number of its last state, how many sets it has, how many of them are taken.
local ends, sets, granted, left = { 0, 0 }, { 0, 0 }, { 0, 0 }, math.huge
ends[1], call_groups, position = struct.unpack('>BB', numbers)
for group = 2, call_groups + 1 do
  sets[group], ends[group], position = struct.unpack('>I4I4', numbers, position)
  ends[group] = ends[group - 1] + ends[group]
end

-- Reads a state and those after it. When it is known how many sets of each group are taken, writes it. `most`: sets of this group that the
-- states before it admit. Returns the states as they were, or nothing if one is not plain.
local step
step = function(i, group, most)
  while i > ends[group] do
    if group == 1 then
      left = most
    else
      most = min(most, left)
      left, granted[group], granted[1] = left - most, most, granted[1] + most
    end
    group = group + 1
    if not ends[group] then
      return ''
    end
    most = sets[group]
  end
  local key, kind, binds, own, cost, wait, count, parts, fit, n, reply = KEYS[i], nil, nil, nil, nil, nil, nil, nil, nil, nil, nil
  kind, binds = string.byte(numbers, position, position + 1)
  position = position + 2
  if kind == 0 or kind == 8 then
    local removals, texts = nil, {}
    cost, wait, count, own, removals, position = struct.unpack('>dddI4c0I4', numbers, position)
    for number = 1, count + removals do
      texts[number], position = struct.unpack('>I4c0', numbers, position)
    end
    if cmsgpack.pack(call('HGETALL', key)) ~= own then
      -- Other nodes have changed it. The mark makes them compute it too, or their calls would always be first.
      local limit = kind == 0 and call('HMGET', key, 'limit')[1]
      if limit and not string.find(limit, ' over ', 1, true) then
        call('HSET', key, 'limit', limit .. ' over 0 0')
      end
      return
    end
    reply = step(i + 1, group, binds == 1 and cost < most and cost or most)
    if reply and wait > 0 and granted[group] >= cost then
      if count > 0 then
        call('HSET', key, unpack(texts, 1, count))
      end
      if removals > 0 then
        call('HDEL', key, unpack(texts, count + 1))
      end
      call('PEXPIRE', key, wait)
    end
    return reply
  end
  @algorithms
end
local states = step(1, 1, left)
if states then
  local reply = struct.pack('>dd', 0, now)
  for group = 2, call_groups + 1 do
    reply = reply .. struct.pack('>d', granted[group])
  end
  return reply .. states
end
@rare
