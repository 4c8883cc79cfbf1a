-- Charges a request: reads all, decides, then writes all.
--
-- KEYS: one a charge. ARGV: the deadline, or 0, which plain.lua has kept; then
-- for each charge eight fields: kind, flags, id, and for a limit increment,
-- tolerance, ban, 0, 0, for an in_flight 0, 0, 0, max, ttl. Returns now, the
-- number of the charge that denies or 0, or -1 when it is too late, the number of
-- values that were not ours, and for each charge: 1 if it denies, debt, wait, rest
-- of the ban.

local flag_names = {o = 'observe', e = 'extend', r = 'returns', p = 'peek', l = 'look', t = 'late'}
local charges = {}
local denied = 0
for i, key in ipairs(KEYS) do
	local at = 2 + (i - 1) * 8
	local flags = ARGV[at + 1]
	local charge = {
		kind = ARGV[at], id = ARGV[at + 2], increment = tonumber(ARGV[at + 3]), tolerance = tonumber(ARGV[at + 4]),
		ban = tonumber(ARGV[at + 5]), max = tonumber(ARGV[at + 6]), ttl = tonumber(ARGV[at + 7]), denies = false, wait = 0,
	}
	for flag in string.gmatch(flags, '.') do charge[flag_names[flag]] = true end
	charges[i] = charge
	if charge.kind == 'l' then
		local limit = read(key, charge.tolerance, charge.ban)
		charge.limit = limit
		charge.wait = math.max(limit.debt + charge.increment - charge.tolerance, charge.late and 0 or limit.ban - now, 0)
		charge.denies = charge.wait > 0
		if charge.denies and charge.ban > 0 and not charge.look and not charge.late and (charge.extend or limit.ban <= now) then
			limit.ban = now + charge.ban
			charge.wait = math.max(charge.wait, charge.ban)
			charge.bans = true
		end
	else
		local beyond = redis.pcall('ZRANGEBYSCORE', key, '(' .. whole(now + charge.ttl), '+inf', 'LIMIT', 0, 100)
		if beyond.err then -- another type of key
			garbage = garbage + 1
			redis.call('DEL', key)
			beyond = {}
		end
		for _, id in ipairs(beyond) do
			garbage = garbage + 1
			redis.call('ZADD', key, whole(now + charge.ttl), id)
		end
		redis.call('ZREMRANGEBYSCORE', key, '-inf', whole(now))
		charge.denies = redis.call('ZCARD', key) >= charge.max
	end
	if charge.denies and not charge.observe then
		denied = i
		break
	end
end

for i, charge in ipairs(charges) do
	local charged = denied == 0 and not charge.denies and not charge.peek
	local limit = charge.limit
	if limit then
		if charged then
			limit.debt = limit.debt + charge.increment
			if charge.returns then
				if #limit.pending >= 500 then table.remove(limit.pending, 1) end -- its answer is likelier to be there
				table.insert(limit.pending, {id = charge.id, own = now + limit.debt, increment = charge.increment})
			end
		end
		if charged or charge.bans or limit.changed and not charge.look then write(KEYS[i], limit, charge.tolerance) end
	elseif charged then
		redis.call('ZADD', KEYS[i], whole(now + charge.ttl), charge.id)
		redis.call('PEXPIRE', KEYS[i], whole(math.ceil(charge.ttl / 1000)))
	end
end

local answer = {now, denied, garbage}
for i = 1, #KEYS do
	local charge = charges[i]
	local limit = charge and charge.limit
	answer[#answer + 1] = charge and charge.denies and 1 or 0
	answer[#answer + 1] = limit and limit.debt or 0
	answer[#answer + 1] = charge and charge.wait or 0
	answer[#answer + 1] = limit and math.max(0, limit.ban - now) or 0
end
return answer
