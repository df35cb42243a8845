-- Several limits of one request: all of them are taken, or none.
--
-- `algorithms` holds the scripts of single limits as functions of KEYS and ARGV; what they write is kept in `writes` until all of them have
-- been asked.
-- KEYS     the state of each limit
-- ARGV[2]  for each limit: its algorithm; 1 if its denial is one for all, 0 if it is only counted; what its script takes in ARGV[3], in
--          ARGV[4] and in ARGV[6]
--
-- Returns the answers of the single limits, in order, as they were before anything was taken.
local answers, written, all = {}, {}, true
for number = 1, #KEYS do
  local algorithm, binding = algorithms[ARGV[5 * number - 3]], ARGV[5 * number - 2] == '1'
  local doubt = ARGV[5 * number + 1]
  writes = {}
  local arguments = { '', 'ask', ARGV[5 * number - 1], ARGV[5 * number], '', doubt ~= '' and doubt or nil }
  local answer = algorithm({ KEYS[number] }, arguments)
  answers[number], written[number] = answer, writes
  all = all and (answer[1] == 1 or not binding)
end
for number = 1, #KEYS do
  -- A limit that denies by itself may keep what a denial keeps.
  if all or answers[number][1] == 0 then
    for _, write in ipairs(written[number]) do
      redis.call(unpack(write))
    end
  end
end
return answers
