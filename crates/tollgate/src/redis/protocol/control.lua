-- What all nodes go by: a policy that was pushed, and tiers that were assigned.
--
-- KEYS[1]  hash of the policy: number, epoch, text (the policy; empty once it was withdrawn)
-- KEYS[2]  hash of the tiers: number, epoch, members (how many have a tier), `t FAMILY MEMBER` for each tier that is assigned, and the
--          latest changes by their number: `c NUMBER` with family, member and tier in a line each, `e NUMBER` with the epoch
-- KEYS[3]  restore only: hash of tiers that one node is writing back, which takes the place of KEYS[2] when it is complete
-- ARGV[1]  now in microseconds, or '' for the server's own time
-- ARGV[2]  what is to be done:
--   poll      ARGV[3], ARGV[4]: number and epoch of the policy that the node knows; ARGV[5], ARGV[6]: those of the tiers
--   push      ARGV[3]: the number that the node knows; ARGV[4]: a random epoch; ARGV[5]: the policy, or '' to withdraw it
--   keep      ARGV[3], ARGV[4], ARGV[5]: number, epoch and text of a policy that the store has lost
--   assign    ARGV[3]: the number that the node knows; ARGV[4]: a random epoch; ARGV[5] to ARGV[7]: family, member and tier ('' for
--             none); ARGV[8]: how many members may have one
--   restore   ARGV[3], ARGV[4]: number and epoch of tiers that the store has lost; ARGV[5]: members, behind the last part, or '';
--             ARGV[6]: milliseconds that unfinished parts are kept; then field and tier by turns
--
-- The number grows with every change, and begins with the time in milliseconds, so that a change after the store has lost its data
-- counts as newer. (Lua writes numbers of up to 14 digits as they are.) The epoch tells two changes apart that have the same number. A
-- store that holds a lower number than a node knows, or none, has lost data: a withdrawn policy leaves its number behind.
--
-- Returns, for poll, { number and epoch of the policy, its text or '', number and epoch of the tiers, 0 for changes or 1 for all of
-- them, and those: lines with family, member and tier }; texts only where the store has something else that is not older. Returns else
-- the number that is in the store then; for assign 0 if there are too many members, -1 if the store has lost tiers that the node knows.
local call = redis.call
local KEPT = 1000

local function number_of(key)
  return tonumber(call('HMGET', key, 'number')[1] or '0')
end

-- The number of a change that is made now.
local function next_number(key, known)
  local number = math.max(number_of(key), tonumber(known))
  if number > 0 then
    return number + 1
  end
  local time = call('TIME')
  return math.floor((tonumber(ARGV[1]) or time[1] * 1000000 + time[2]) / 1000)
end

local op = ARGV[2]
if op == 'push' or op == 'keep' and number_of(KEYS[1]) < tonumber(ARGV[3]) then
  local number = op == 'push' and next_number(KEYS[1], ARGV[3]) or tonumber(ARGV[3])
  call('HSET', KEYS[1], 'number', number, 'epoch', ARGV[4], 'text', ARGV[5])
  return number
elseif op == 'keep' then
  return number_of(KEYS[1])
elseif op == 'restore' then
  local number = number_of(KEYS[2])
  if number >= tonumber(ARGV[3]) then
    return number
  end
  for index = 7, #ARGV, 2 do
    call('HSET', KEYS[3], ARGV[index], ARGV[index + 1])
  end
  if ARGV[5] == '' then
    call('PEXPIRE', KEYS[3], ARGV[6])
    return number
  end
  call('HSET', KEYS[3], 'number', ARGV[3], 'epoch', ARGV[4], 'members', ARGV[5], 'e ' .. ARGV[3], ARGV[4])
  call('PERSIST', KEYS[3])
  call('RENAME', KEYS[3], KEYS[2])
  return tonumber(ARGV[3])
elseif op == 'assign' then
  if number_of(KEYS[2]) < tonumber(ARGV[3]) then
    return -1
  end
  local number = next_number(KEYS[2], ARGV[3])
  local name = 't ' .. ARGV[5] .. ' ' .. ARGV[6]
  local stored = call('HMGET', KEYS[2], name, 'members')
  local members = tonumber(stored[2] or '0')
  if ARGV[7] == '' then
    members = stored[1] and members - 1 or members
    call('HDEL', KEYS[2], name)
  else
    members = stored[1] and members or members + 1
    if members > tonumber(ARGV[8]) then
      return 0
    end
    call('HSET', KEYS[2], name, ARGV[7])
  end
  call('HSET', KEYS[2], 'members', members, 'number', number, 'epoch', ARGV[4], 'e ' .. number, ARGV[4])
  call('HSET', KEYS[2], 'c ' .. number, ARGV[5] .. '\n' .. ARGV[6] .. '\n' .. ARGV[7])
  call('HDEL', KEYS[2], 'c ' .. (number - KEPT), 'e ' .. (number - KEPT))
  return number
end

-- Whether the store has something else than the node knows that is not older.
local function is_news(stored, number, epoch)
  local known = tonumber(number)
  return stored[1] > known or stored[1] == known and stored[2] ~= epoch
end
local function version_of(key)
  return { number_of(key), call('HMGET', key, 'epoch')[1] or '' }
end

local policy, tiers = version_of(KEYS[1]), version_of(KEYS[2])
local text = is_news(policy, ARGV[3], ARGV[4]) and call('HMGET', KEYS[1], 'text')[1] or ''
local reply = { policy[1], policy[2], text, tiers[1], tiers[2], 0 }
if not is_news(tiers, ARGV[5], ARGV[6]) then
  return reply
end
local known = tonumber(ARGV[5])
-- Changes follow on what the node knows only if that is in the history of the store.
local is_known = known > 0 and call('HMGET', KEYS[2], 'e ' .. known)[1] == ARGV[6]
if is_known and tiers[1] > known and tiers[1] - known < KEPT then
  for number = known + 1, tiers[1] do
    reply[#reply + 1] = call('HMGET', KEYS[2], 'c ' .. number)[1] or ''
  end
  return reply
end
reply[6] = 1
local all = call('HGETALL', KEYS[2])
for index = 1, #all, 2 do
  local family, member = string.match(all[index], '^t (%S+) (.*)$')
  if family then
    reply[#reply + 1] = family .. '\n' .. member .. '\n' .. all[index + 1]
  end
end
return reply
