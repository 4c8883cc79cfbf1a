-- Shared by the scripts that know limits.
--
-- A limit's key holds, separated by spaces: the TAT, the tolerance that it is
-- measured in, and the end of the ban or 0; then for each charge that may still
-- be given back its id, the TAT with it as if what was given back had never
-- been, and its increment.
--
-- Whatever stands there was perhaps not written by us: it is clamped to what
-- could have been, and counted.

local garbage = 0

local function whole(n) return string.format('%.0f', n) end

-- finite is the number that a text stands for, or nil.
local function finite(text)
	local n = tonumber(text)
	if n and n == n and n > -1e17 and n < 1e17 then return n end
end

-- read returns the debt, measured in this tolerance, the end of the ban, and the
-- charges that may be given back. Without a longest ban any is believed. changed
-- says that this is not what stands there, and must be written: measured anew
-- later, a debt would be another one.
local function read(key, tolerance, longest_ban)
	local limit = {debt = 0, ban = 0, pending = {}, changed = false}
	local value = redis.pcall('GET', key)
	if not value then return limit end
	if type(value) ~= 'string' or #value > 131072 then -- another type of key
		garbage = garbage + 1
		return limit
	end
	local fields = {}
	local tat, measure, ban = string.match(value, '^(%d+) (%d+) (%d+)$') -- as good as always
	if not tat then
		for field in string.gmatch(value, '%S+') do fields[#fields + 1] = field end
		tat, measure, ban = fields[1], fields[2], fields[3]
	end
	tat, measure, ban = finite(tat), finite(measure), finite(ban)
	if not tat or not measure or not ban or measure <= 0 then
		garbage = garbage + 1
		measure, ban = tolerance, 0
		if not tat then return limit end
	end
	local debt = math.max(0, tat - now)
	if debt > measure then -- the clock was set back, or nobody of us wrote it
		garbage = garbage + 1
		debt = measure
	end
	limit.changed = measure ~= tolerance or debt ~= tat - now and debt > 0
	local scale = tolerance / measure -- the part of the budget that is used stays
	limit.debt = math.min(tolerance, math.ceil(debt * scale))
	if ban > now then
		longest_ban = longest_ban or ban - now
		if longest_ban > 0 and ban - now > longest_ban then garbage = garbage + 1 end
		limit.ban = math.min(ban, now + longest_ban)
		limit.changed = limit.changed or limit.ban ~= ban
	end
	for i = 4, #fields - 2, 3 do
		local own, increment = finite(fields[i + 1]), finite(fields[i + 2])
		if own and increment and increment > 0 and own > now and own - now <= measure then
			table.insert(limit.pending, {id = fields[i], own = now + math.ceil((own - now) * scale), increment = math.ceil(increment * scale)})
		end
	end
	return limit
end

local function write(key, limit, tolerance)
	local left = math.max(limit.debt, limit.ban - now)
	if left <= 0 then
		redis.call('DEL', key)
		return
	end
	if #limit.pending == 0 then
		local value = string.format('%.0f %.0f %.0f', now + limit.debt, tolerance, math.max(0, limit.ban))
		redis.call('SET', key, value, 'PX', whole(math.ceil(left / 1000)))
		return
	end
	local fields = {whole(now + limit.debt), whole(tolerance), whole(math.max(0, limit.ban))}
	for _, charge in ipairs(limit.pending) do
		fields[#fields + 1] = charge.id
		fields[#fields + 1] = whole(charge.own)
		fields[#fields + 1] = whole(charge.increment)
	end
	redis.call('SET', key, table.concat(fields, ' '), 'PX', whole(math.ceil(left / 1000)))
end
