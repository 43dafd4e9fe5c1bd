-- End a session for good, whoever owns it.
-- The owner does not change, so that its next call gets 'ended' and not 'fenced'.
-- ARGV: principal, finish, finished_ttl_ms.

local principal, finish, finished_ttl_ms = ARGV[1], ARGV[2], ARGV[3]

local held = redis.call('HMGET', SESSION, 'principal', 'state')
if not held[1] or held[1] ~= principal then return {'unknown'} end
-- A repeat writes too, so that WAIT waits for the first call's writes.
if held[2] ~= 'finished' then redis.call('HSET', SESSION, 'state', 'finished', 'finish', finish) end
touch(finished_ttl_ms)
return {'ok'}
