-- Says that an instance is there, or goes.
--
-- KEYS: the instances, the check of the pepper, and perhaps one that no node of
-- a cluster would take together with these. ARGV: the instance, its ttl in
-- microseconds or 0, the check, and for how long that holds in milliseconds.
-- Returns now, 0, the number of values that were not ours, the number of
-- instances, and 1 if the pepper is another one.

local instance, ttl, check, held = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local function whole(n) return string.format('%.0f', n) end

local garbage = 0
local known = redis.pcall('GET', KEYS[2])
if known and (type(known) ~= 'string' or #known ~= #check or string.find(known, '%X')) then
	garbage = garbage + 1
	known = false
end
if known and known ~= check then
	if redis.call('PTTL', KEYS[2]) < 0 then redis.call('PEXPIRE', KEYS[2], held) end
	redis.pcall('ZREM', KEYS[1], instance)
	return {now, 0, garbage, 0, 1}
end
if ttl > 0 then
	redis.call('SET', KEYS[2], check, 'PX', held)
	local added = redis.pcall('ZADD', KEYS[1], whole(now + ttl), instance)
	if type(added) ~= 'number' then
		garbage = garbage + 1
		redis.call('DEL', KEYS[1])
		redis.call('ZADD', KEYS[1], whole(now + ttl), instance)
	end
	redis.call('PEXPIRE', KEYS[1], held)
else
	redis.pcall('ZREM', KEYS[1], instance)
end
redis.pcall('ZREMRANGEBYSCORE', KEYS[1], '-inf', whole(now))
local beyond = redis.pcall('ZREMRANGEBYSCORE', KEYS[1], '(' .. whole(now + math.max(ttl, 5000000)), '+inf')
if type(beyond) == 'number' then garbage = garbage + beyond end
local instances = redis.pcall('ZCARD', KEYS[1])
if type(instances) ~= 'number' then instances = 1 end
return {now, 0, garbage, instances, 0}
