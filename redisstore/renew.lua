-- Says that requests of in_flights still run.
--
-- KEYS: one a request. ARGV: for each its id and the ttl in microseconds.

for i, key in ipairs(KEYS) do
	local id, ttl = ARGV[2 * i - 1], tonumber(ARGV[2 * i])
	local added = redis.pcall('ZADD', key, string.format('%.0f', now + ttl), id)
	if type(added) == 'number' then redis.call('PEXPIRE', key, string.format('%.0f', math.ceil(ttl / 1000))) end
end
return {now, 0, 0}
