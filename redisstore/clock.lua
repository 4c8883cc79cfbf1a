-- All times are whole microseconds of this server's clock.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
