-- One limit on one key. `@name` stands for a section of the algorithm's file, which is put in its place when the script is loaded.
--
-- KEYS[1]  the state
-- ARGV[1]  the limit that the caller asks under: its text as it is kept beside states, behind four bytes with its length; its numbers, eight
--          bytes each, the highest first; when this server took over, in microseconds (0: long ago). Then four numbers for each step, of
--          which there is at least one (with a count of 0 it only reads):
--            asks    cost, accepted wait in microseconds (-1: none stated), how many equal asks, 0
--            lends   1, 0, how many permits are wanted, into how many parts the free permits are divided, of which one is lent
--            refund  cost, start of the grant in microseconds, -1, 0
--
-- Returns numbers of eight bytes: how many were admitted or lent, now, and the state before the first step. A state that is not plain
-- (`@rare`) is not touched: then the first number is -1, and all fields follow, for the caller to compute with.
@time
local key, numbers, position = KEYS[1], ARGV[1], 1
local own, cost, wait, count, parts, fit, n
@read
local reply = @reply
local admitted, changed = 0, false
while true do
  if count < 0 then
    @refund
  else
    @fit
    if parts > 0 then
      -- If nothing is free, lending is a denied ask.
      count = min(count, max(1, ceil(fit / parts)))
    end
    if fit > count then
      fit = count
    elseif fit < 0 then
      fit = 0
    end
    n = fit
    @spend
    admitted = admitted + n
  end
  if position > #numbers then
    break
  end
  cost, wait, count, parts, position = struct.unpack('>dddd', numbers, position)
end
if changed or admitted > 0 then
  @write
end
return struct.pack('>dd', admitted, now) .. reply
