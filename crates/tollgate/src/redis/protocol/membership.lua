-- Records the heartbeat of a node, and counts the live nodes.
--
-- KEYS[1]  sorted set: nodes, by their last heartbeat, in microseconds
-- ARGV[1]  how long a node counts after a heartbeat, in microseconds (eight bytes); the node, after four bytes with its length
--
-- Returns how many nodes count now.
@time
local counts_for, node = struct.unpack('>dI4c0', ARGV[1])
call('ZADD', KEYS[1], now_text, node)
call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - counts_for)
-- Nodes that stopped before the clock was set back.
call('ZREMRANGEBYSCORE', KEYS[1], now + counts_for, '+inf')
call('PEXPIRE', KEYS[1], ceil(counts_for / 1000))
return call('ZCARD', KEYS[1])
