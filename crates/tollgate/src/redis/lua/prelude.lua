-- Every script begins with this.
--
-- ARGV[1]  now in microseconds, or '' for the server's own time, which is read once
-- ARGV[2]  what to do: ask, refund, return (give back what was lent and not spent) or charge
-- ARGV[3]  numbers, eight bytes each, the highest first: handing them over one by one would take a sixth of the whole time.
--          First those of the limit, then:
--            ask     runs of equal asks, three numbers each: cost (1 .. size), accepted wait in microseconds (-1: none stated),
--                    how many
--            refund  cost, start of the grant
--            return  the same
--            charge  cost
-- ARGV[4]  the limit by which the states of this call are understood, as it is kept beside them (the field `limit`)
-- ARGV[5]  ask: nothing or '', or three numbers of what is to be lent when all asks are answered: how many permits are wanted; into how
--          many parts what is left is cut, of which one is lent; how long it is counted as out, in microseconds (0: it is an
--          ordinary debit)
--          return: how many returns there were before, for all that the caller knows
-- ARGV[6]  nothing, or two numbers: since when this server writes, in microseconds, and how long permits are lent. What was written
--          before may be lost, and counts as taken.
--
-- Numbers are integers below 2^53, exact in a double; redis.call writes them with 17 digits. Everything is computed before
-- anything is written: a script that fails has changed nothing.
--
-- A script answers with one string, a list in MessagePack: it takes the server and the caller less time than a list of the protocol.
local call, floor, ceil, max, min = redis.call, math.floor, math.ceil, math.max, math.min
local packed = cmsgpack.pack
local now
if ARGV[1] == '' then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
else
  now = tonumber(ARGV[1])
end

-- A stored number, or `absent` where there is none. What Tollgate has not written stops the script.
local function whole(text, absent)
  local number = absent
  if text then
    number = string.find(text, '^-?%d+$') and tonumber(text)
  end
  if not number or number > 9007199254740991 or number < -9007199254740991 then
    error('TOLLGATE foreign value: ' .. string.sub(tostring(text), 1, 64))
  end
  return number
end

-- What is given back counts once: the second time it is not its turn any more.
if ARGV[2] == 'return' then
  local returns = whole(call('HMGET', KEYS[1], 'returns')[1], 0)
  if returns ~= tonumber(ARGV[5]) then
    return packed({ -1, now, returns })
  end
  -- Whether what was lent before this server took over is known here, nobody can tell: it stays where it is.
  if ARGV[6] and struct.unpack('>i8', ARGV[3], #ARGV[3] - 15) < struct.unpack('>i8', ARGV[6]) then
    return packed({ 0, now })
  end
end

-- Until `full_at` the state matters. A second more covers the server's own, coarser clock of expiries.
local function expire(key, full_at)
  call('PEXPIRE', key, ceil(max(0, full_at - now) / 1000) + 1000)
end

