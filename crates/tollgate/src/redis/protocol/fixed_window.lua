-- FIXED_WINDOW: the twin of fixed_window.rs.
--
-- A hash with
--   window  when the window began, in microseconds
--   count   permits taken; permits above the limit are reserved in the following windows
--   limit   the limit that it was written under: limit/length; a suffix marks a state that is not plain
-- Numbers of the limit: limit in permits, the window in microseconds, 1 if denied requests count.
-- @read
local limit, length, counts_denied, since
own, limit, length, counts_denied, since, cost, wait, count, parts, position =
  struct.unpack('>I4c0dddddddd', numbers, position)
local window, taken, written, found = (now - now % length) / length, 0, nil, 0
local stored = call('HMGET', key, 'window', 'count', 'limit')
if stored[3] == own then
  written, taken = stored[1] / length, stored[2] + 0
  if not (written <= window + 1 and taken >= 0 and taken <= 3 * limit) then
    @rare
  end
  found = taken
  if window > written then
    taken = max(0, taken - (window - written) * limit)
  else
    window = written
  end
elseif stored[1] or stored[2] or stored[3] then
  @rare
end
-- The window in which the server took over counts as used up.
if since > 0 and window == floor(since / length) and taken < limit then
  @rare
end
-- @reply
struct.pack('>dd', window, taken)
-- @fit
fit = floor((limit - taken) / cost)
if fit < count and wait > 0 then
  @rare
end
-- @spend
taken = taken + n * cost
if fit < count and counts_denied == 1 then
  taken, changed = max(taken, limit), true
end
-- @refund
if wait > now or taken > limit then
  @rare
end
if cost > 0 and taken > 0 and floor(wait / length) == window then
  taken, changed = max(0, taken - cost), true
end
-- @write
if window == written and taken <= limit and found > 0 and found <= limit then
  -- In the same window the key expires at the same time. (An empty one expires sooner.)
  call('HSET', key, 'count', taken)
else
  call('HSET', key, 'window', window * length, 'count', taken, 'limit', own)
  @expire((window + ceil(taken / limit)) * length)
end
