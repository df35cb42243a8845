-- Sets of limits: of each set all limits are taken, or none.
--
-- `algorithms` holds the scripts of single limits as functions of KEYS and ARGV; what they write is kept in `writes` until it is known what
-- is taken.
-- KEYS     the state of each limit: first the one that all sets have in common, if there is one; then the others of each group of equal sets
-- ARGV[2]  numbers, eight bytes each: how many states are common to all sets (0 or 1), and for each group how many equal sets it has and
--          how many states of its own
-- then for each state, from ARGV[3] on: its algorithm; 1 if its denial is one for all, 0 if it is only counted; what its script takes in
--          ARGV[3], the last number being how many sets ask for it; what it takes in ARGV[4] and in ARGV[6]
--
-- Returns a list, in MessagePack: how many sets of each group were taken; and then the answers of the single limits, in the order of KEYS, as they were
-- before anything was taken.
local answers, written = {}, {}
-- What the scripts of single limits are called with: the same tables for all, since a call keeps nothing of them.
local keys, arguments = {}, { '', 'ask', '', '', '' }

-- Asks for one state, and keeps what that would write. `count`: how many ask, if they are not as many as it says in the numbers.
local function evaluate(number, count)
  local at = 5 * number
  local numbers, doubt = ARGV[at], ARGV[at + 2]
  if count then
    numbers = string.sub(numbers, 1, -9) .. struct.pack('>i8', count)
  end
  writes = {}
  written[number] = writes
  keys[1], arguments[3], arguments[4] = KEYS[number], numbers, ARGV[at + 1]
  arguments[6] = doubt ~= '' and doubt or nil
  return algorithms[ARGV[at - 2]](keys, arguments)
end

-- As many as all limits of some states admit that are binding.
local function fit_of(from, to, count, asked)
  local fit = count
  for number = from, to do
    local answer = evaluate(number, count ~= asked and count or nil)
    answers[number] = answer
    if answer[1] < fit and ARGV[5 * number - 1] == '1' then
      fit = answer[1]
    end
  end
  return fit
end

-- Writes what is taken. A limit that denies by itself may keep what a denial keeps.
local function take(from, to, count)
  for number = from, to do
    if answers[number][1] > count then
      if count == 0 then
        written[number] = {}
      else
        evaluate(number, count)
      end
    end
    for _, write in ipairs(written[number]) do
      redis.call(unpack(write))
    end
  end
end

local shared, position = struct.unpack('>i8', ARGV[2])
local groups, first, total, asked = {}, shared + 1, 0, 0
while position <= #ARGV[2] do
  local count, states
  count, states, position = struct.unpack('>i8i8', ARGV[2], position)
  local fit = fit_of(first, first + states - 1, count, count)
  groups[#groups + 1] = { first, first + states - 1, fit }
  first, total, asked = first + states, total + fit, asked + count
end
local left = fit_of(1, shared, total, asked)
take(1, shared, left)
local taken = {}
for number, group in ipairs(groups) do
  taken[number] = min(group[3], left)
  left = left - taken[number]
  take(group[1], group[2], taken[number])
end
return cmsgpack.pack({ taken, unpack(answers, 1, #KEYS) })
