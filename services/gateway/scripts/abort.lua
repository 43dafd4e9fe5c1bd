-- End a session for good, whoever owns it.
-- Its owner stays its owner, so that it is told 'ended' and not 'fenced'.
-- ARGV: principal, finish, finished_ttl_ms.

local principal, finish, finished_ttl_ms = ARGV[1], ARGV[2], ARGV[3]

local held = redis.call('HMGET', SESSION, 'principal', 'state')
if not held[1] or held[1] ~= principal then return {'unknown'} end
if held[2] == 'finished' then return {'ok'} end

redis.call('HSET', SESSION, 'state', 'finished', 'finish', finish)
touch(finished_ttl_ms)
return {'ok'}
