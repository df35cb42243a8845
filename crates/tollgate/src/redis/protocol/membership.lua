-- Who is there: a node says that it lives, and hears how many do.
--
-- KEYS[1]  sorted set: nodes, by when they were last heard of, in microseconds
-- ARGV[1]  for how long a node counts after it was heard of, in microseconds (eight bytes); the node, behind four bytes with its length
--
-- Returns how many nodes count now.
@time
local counts_for, node = struct.unpack('>dI4c0', ARGV[1])
call('ZADD', KEYS[1], now_text, node)
call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - counts_for)
-- Nodes that died before the clock was set back.
call('ZREMRANGEBYSCORE', KEYS[1], now + counts_for, '+inf')
call('PEXPIRE', KEYS[1], ceil(counts_for / 1000))
return call('ZCARD', KEYS[1])
