-- End a session for good, whoever owns it.
-- ARGV: principal, nonce (fresh, nobody's), finish, finished_ttl_ms.

local principal, nonce, finish, finished_ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local held = redis.call('HMGET', SESSION, 'principal', 'state')
if not held[1] or held[1] ~= principal then return {'unknown'} end
if held[2] == 'finished' then return {'ok'} end

redis.call('HINCRBY', SESSION, 'epoch', 1)
redis.call('HSET', SESSION, 'nonce', nonce, 'state', 'finished', 'finish', finish)
touch(finished_ttl_ms)
return {'ok'}
