-- Sets of limits: of each set all limits are taken, or none. `@name` stands for sections of the algorithms' files, as in single.lua.
--
-- KEYS     the states: first the one that all sets have in common, if there is one; then the others of each group of equal sets
-- ARGV[2]  numbers, eight bytes each: how many states are common to all sets (0 or 1), and for each group how many equal sets it has and
--          how many states of its own
-- then two for each state: its limit as it is kept beside it; and a byte for the algorithm, one that is 1 if a denial binds the set, and
--          numbers as in single.lua, with one step
-- A state may have been computed by the caller, whatever its algorithm (byte 0): then these two are the fields that it was computed
--          from; and numbers: how many sets take from it, milliseconds to live (0: nothing is written), and how many texts follow of fields
--          to set with their values and how many of fields to remove
--
-- Returns numbers: 0, now, how many sets of each group were taken, and the states before. If a state is not plain, or is not the one that
-- was computed from, nothing is taken: -1, now, and the fields of all states that are hashes.
@time
local fits, binding, shares, replies, last = {}, {}, {}, {}, #KEYS

-- How many sets of each group are taken, and so how many take from each state.
local function share()
  local header, groups = ARGV[2], ''
  local common, position = struct.unpack('>i8', header)
  local left, first, total = common == 1 and binding[1] == 1 and fits[1] or math.huge, common + 1, 0
  while position <= #header do
    local sets, states
    sets, states, position = struct.unpack('>i8i8', header, position)
    local until_state = first + states - 1
    for number = first, until_state do
      if binding[number] == 1 then
        sets = min(sets, fits[number])
      end
    end
    sets = min(sets, left)
    for number = first, until_state do
      shares[number] = min(sets, fits[number])
    end
    left, total, first, groups = left - sets, total + sets, until_state + 1, groups .. struct.pack('>i8', sets)
  end
  if common == 1 then
    shares[1] = min(total, fits[1])
  end
  return groups
end

-- Reads a state, then those after it; and when it is known how many take from each, writes it. Returns the groups, or nothing.
local step
step = function(i)
  if i > last then
    return share()
  end
  local key, own, numbers, position, groups = KEYS[i], ARGV[2 * i + 1], ARGV[2 * i + 2], 3, nil
  local kind, binds = string.byte(numbers, 1, 2)
  local cost, wait, count, fit, n
  if kind == 0 then
    local ttl, sets, removals
    fit, ttl, sets, removals, position = struct.unpack('>i8i8i8i8', numbers, position)
    if cmsgpack.pack(call('HGETALL', key)) ~= own then
      -- Others have changed it. From now on they compute it as well, or their calls would always be first.
      local limit = call('HMGET', key, 'limit')[1]
      if limit and not string.find(limit, ' over ', 1, true) then
        call('HSET', key, 'limit', limit .. ' over 0 0')
      end
      return
    end
    fits[i], binding[i], replies[i] = fit, binds, ''
    groups = step(i + 1)
    if groups and shares[i] == fit and ttl > 0 then
      local texts = {}
      for number = 1, sets + removals do
        texts[number], position = struct.unpack('>I4c0', numbers, position)
      end
      if sets > 0 then
        call('HSET', key, unpack(texts, 1, sets))
      end
      if removals > 0 then
        call('HDEL', key, unpack(texts, sets + 1))
      end
      call('PEXPIRE', key, ttl)
    end
    return groups
  end
  @algorithms
end
local groups = step(1)
if groups then
  return struct.pack('>i8i8', 0, now) .. groups .. table.concat(replies)
end
@rare
