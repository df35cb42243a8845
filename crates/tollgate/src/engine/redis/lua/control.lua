-- What all nodes go by: a policy that was pushed, and tiers that were assigned.
--
-- KEYS[1]  hash: number (how often a policy was pushed or withdrawn), text (the policy; none if it was withdrawn)
-- KEYS[2]  hash: number (how many changes there were), members (how many have a tier), `t FAMILY MEMBER` for each tier that is assigned, and the latest changes by
--          their number: `c NUMBER` with family, member and tier in a line each
-- ARGV[1]  poll: ARGV[2] and ARGV[3] are the numbers that the node knows
--          push: ARGV[2] is the policy; withdraw
--          assign: ARGV[2] to ARGV[4] are family, member and tier ('' for none), ARGV[5] how many members may have one
--
-- Returns, for poll, { number of the policy, its text or '', number of the tiers, 0 for changes or 1 for all of them, and those: lines
-- with family, member and tier }, texts only where the number is another; else the new number, -1 if there are too many.
local call = redis.call
local KEPT = 1000

local function number_of(key)
  return tonumber(call('HMGET', key, 'number')[1] or '0')
end

local op = ARGV[1]
if op == 'push' or op == 'withdraw' then
  local number = number_of(KEYS[1]) + 1
  call('HSET', KEYS[1], 'number', number, 'text', ARGV[2] or '')
  return number
elseif op == 'assign' then
  local number = number_of(KEYS[2]) + 1
  local name = 't ' .. ARGV[2] .. ' ' .. ARGV[3]
  local stored = call('HMGET', KEYS[2], name, 'members')
  local members = tonumber(stored[2] or '0')
  if ARGV[4] == '' then
    members = stored[1] and members - 1 or members
    call('HDEL', KEYS[2], name)
  else
    members = stored[1] and members or members + 1
    if members > tonumber(ARGV[5]) then
      return -1
    end
    call('HSET', KEYS[2], name, ARGV[4])
  end
  call('HSET', KEYS[2], 'members', members)
  call('HSET', KEYS[2], 'number', number, 'c ' .. number, ARGV[2] .. '\n' .. ARGV[3] .. '\n' .. ARGV[4])
  call('HDEL', KEYS[2], 'c ' .. (number - KEPT))
  return number
end

local policy, known = number_of(KEYS[1]), tonumber(ARGV[2])
local reply = { policy, policy ~= known and call('HMGET', KEYS[1], 'text')[1] or '' }
local tiers, known_tiers = number_of(KEYS[2]), tonumber(ARGV[3])
reply[3], reply[4] = tiers, 0
if tiers > known_tiers and known_tiers > 0 and tiers - known_tiers < KEPT then
  for number = known_tiers + 1, tiers do
    reply[#reply + 1] = call('HMGET', KEYS[2], 'c ' .. number)[1] or ''
  end
elseif tiers ~= known_tiers then
  reply[4] = 1
  local all = call('HGETALL', KEYS[2])
  for index = 1, #all, 2 do
    local family, member = string.match(all[index], '^t (%S+) (.*)$')
    if family then
      reply[#reply + 1] = family .. '\n' .. member .. '\n' .. all[index + 1]
    end
  end
end
return reply
