-- Undoes charges.
--
-- KEYS: one a charge. ARGV: for each charge five fields: kind, id, the TAT that
-- the charge made or 0 where its place is remembered by id, increment,
-- tolerance. Returns now, 0, the number of values that were not ours, and
-- for each charge the debt that is left.

local debts = {}
for i, key in ipairs(KEYS) do
	local at = 1 + (i - 1) * 5
	local id, tat, increment = ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
	local tolerance = tonumber(ARGV[at + 4])
	debts[i] = 0
	if ARGV[at] == 'l' then
		local limit = read(key, tolerance)
		local own = tat
		if own == 0 then
			for n, charge in ipairs(limit.pending) do
				if charge.id == id then
					own, increment = charge.own, charge.increment
					table.remove(limit.pending, n)
					break
				end
			end
		end
		-- what has decayed is gone already, and would be a budget for free
		local amount = math.min(increment, own - now)
		if amount > 0 then
			for _, charge in ipairs(limit.pending) do
				if charge.own > own then charge.own = charge.own - amount end
			end
			limit.debt = math.max(0, limit.debt - amount)
		end
		if amount > 0 or limit.changed then write(key, limit, tolerance) end
		debts[i] = limit.debt
	else
		redis.pcall('ZREM', key, id)
	end
end

local answer = {now, 0, garbage}
for i, debt in ipairs(debts) do answer[i + 3] = debt end
return answer
