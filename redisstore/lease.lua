-- Hands out a part of a ceiling.
--
-- KEYS: the ceiling. ARGV: the deadline, or 0; the length of a slot, slots in a
-- window, the ceiling's count, permits wanted, admitted without the store; the
-- number of a slot that is over, and of its permits those not used.
--
-- The key is a hash from each slot's number to the permits granted in it, and
-- 'width' is the slot's length. Returns now, 0 or -1 when it is too late, the
-- number of values that were not ours; the slot, the permits granted, what is
-- left of the slot, permits granted in the window, and the wait until something
-- can be granted.

local deadline, width, slots, count = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local want, spent, over, unused = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
if deadline > 0 and now > deadline then return {now, -1, 0} end

local function whole(n) return string.format('%.0f', n) end

local garbage = 0
local slot = math.floor(now / width)
local fields = redis.pcall('HGETALL', KEYS[1])
if fields.err then
	garbage = 1
	redis.call('DEL', KEYS[1])
	fields = {}
end
local granted, written, measure = {}, {}, nil
for i = 1, #fields, 2 do
	if fields[i] == 'width' then
		measure = tonumber(fields[i + 1])
	else
		local number, n = tonumber(fields[i]), tonumber(fields[i + 1])
		if number and number == number and n and n >= 0 and n <= 1e15 then
			granted[number] = math.min(n, count)
			written[number] = fields[i]
		else
			garbage = garbage + 1
			redis.call('HDEL', KEYS[1], fields[i])
		end
	end
end

-- What was granted in slots of another length, or in the future of a clock that
-- was set back, counts as granted now.
local carried, oldest, sum = 0, slot, 0
local other = #fields > 0 and measure ~= width
for number, n in pairs(granted) do
	if other or number > slot then
		carried = carried + n
	elseif number >= slot - slots then
		if number == over then n = math.max(0, n - unused) end
		granted[number] = n
		sum = sum + n
		if n > 0 then oldest = math.min(oldest, number) end
	end
	if other or number > slot or number < slot - slots then
		granted[number] = nil
		redis.call('HDEL', KEYS[1], written[number])
	end
end
carried = math.min(carried, count)
granted[slot] = (granted[slot] or 0) + carried + spent
sum = sum + carried + spent

local grant = math.max(0, math.min(want, count - sum))
granted[slot] = granted[slot] + grant
sum = sum + grant
redis.call('HSET', KEYS[1], 'width', whole(width), whole(slot), whole(granted[slot]))
if granted[over] and over ~= slot then redis.call('HSET', KEYS[1], whole(over), whole(granted[over])) end
redis.call('PEXPIRE', KEYS[1], whole(math.ceil((slots + 2) * width / 1000)))

local wait = 0
if grant == 0 then wait = (oldest + slots + 1) * width - now end
return {now, 0, garbage, slot, grant, (slot + 1) * width - now, sum, wait}
