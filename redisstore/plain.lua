-- The requests that come most often: they count against nothing but limits without
-- flags and bans, whose keys hold plain debts or nothing. All else is left to what
-- follows. The arguments and the answer are those of take.lua.

local deadline = tonumber(ARGV[1])
if deadline > 0 and now > deadline then return {now, -1, 0} end

-- plain_debt is what the key of a charge owes, or nil where that is not plain.
local function plain_debt(key, at)
	if ARGV[at] ~= 'l' or ARGV[at + 1] ~= '' or ARGV[at + 5] ~= '0' then return nil end
	local value = redis.pcall('GET', key)
	if not value then return 0 end
	if type(value) ~= 'string' then return nil end
	local tat, measure = string.match(value, '^(%d+) (%d+) 0$')
	if measure ~= ARGV[at + 4] then return nil end
	local debt = math.max(0, tat - now)
	return debt <= tonumber(measure) and debt or nil
end

local debts, denied, wait = {}, 0, 0
for i, key in ipairs(KEYS) do
	local at = 2 + (i - 1) * 8
	local debt = plain_debt(key, at)
	if not debt then break end
	debts[i] = debt
	if denied == 0 and debt + ARGV[at + 3] > tonumber(ARGV[at + 4]) then
		denied, wait = i, debt + ARGV[at + 3] - ARGV[at + 4]
	end
end

if debts[#KEYS] then
	if denied == 0 then
		for i, debt in ipairs(debts) do
			local tolerance = ARGV[i * 8 - 2]
			debts[i] = debt + ARGV[i * 8 - 3]
			redis.call('SET', KEYS[i], string.format('%d %s 0', now + debts[i], tolerance), 'PX', string.format('%d', math.ceil(debts[i] / 1000)))
		end
	end
	local answer = {now, denied, 0, denied == 1 and 1 or 0, debts[1], denied == 1 and wait or 0, 0}
	for i = 2, #KEYS do
		local at = i * 4
		answer[at], answer[at + 1], answer[at + 2], answer[at + 3] = denied == i and 1 or 0, debts[i], denied == i and wait or 0, 0
	end
	return answer
end

