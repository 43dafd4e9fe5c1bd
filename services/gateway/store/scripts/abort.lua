-- End a session for good, whoever owns it.
-- The owner does not change, so that its next call gets 'ended' and not 'fenced'. That the session was aborted is
-- kept for longer than the session: a step of the clock may expire it before an owner, or a former one, calls.
-- ARGV: latest_ms, principal, finish, finished_ttl_ms, aborted_ttl_ms.

local latest_ms, principal, finish, finished_ttl_ms, aborted_ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

if is_late(latest_ms) then return {'late'} end

local held = redis.call('HMGET', SESSION, 'principal', 'state')
if not held[1] or held[1] ~= principal then return {'unknown'} end
-- A repeat writes too, so that WAIT waits for the first call's writes.
if held[2] ~= 'finished' then
  redis.call('HSET', SESSION, 'state', 'finished', 'finish', finish)
  redis.call('SET', ABORTED, '', 'PX', aborted_ttl_ms)
end
touch(finished_ttl_ms)
return {'ok'}
