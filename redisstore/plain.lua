-- The request that comes most often: one limit without anything special, whose
-- key holds a plain debt or nothing. All else is left to what follows. The
-- arguments and the answer are those of take.lua.
if not KEYS[2] and ARGV[2] == 'l' and ARGV[3] == '' and ARGV[7] == '0' then
	local deadline, increment, tolerance = tonumber(ARGV[1]), tonumber(ARGV[5]), tonumber(ARGV[6])
	if deadline > 0 and now > deadline then return {now, -1, 0} end
	local value = redis.pcall('GET', KEYS[1])
	local tat, debt = nil, 0
	if type(value) == 'string' then
		tat = tonumber(string.match(value, '^(%d+) ' .. ARGV[6] .. ' 0$'))
		debt = tat and math.max(0, tat - now)
	end
	if not value or tat and debt <= tolerance then
		local wait = debt + increment - tolerance
		if wait > 0 then return {now, 1, 0, 1, debt, wait, 0} end
		debt = debt + increment
		redis.call('SET', KEYS[1], string.format('%.0f %s 0', now + debt, ARGV[6]), 'PX', string.format('%.0f', math.ceil(debt / 1000)))
		return {now, 0, 0, 0, debt, 0, 0}
	end
end

