-- Remove a session for good, whoever owns it.
-- As after an abort, no owner can recreate it. Its principal is kept with that, so that the call can be repeated.
-- ARGV: latest_ms, principal, aborted_ttl_ms.

local latest_ms, principal, aborted_ttl_ms = ARGV[1], ARGV[2], ARGV[3]

if is_late(latest_ms) then return {'late'} end

local holder = redis.call('HGET', SESSION, 'principal') or redis.call('GET', ABORTED)
if holder ~= principal then return {'unknown'} end
-- A repeat writes too, so that WAIT waits for the first call's writes.
redis.call('SET', ABORTED, principal, 'PX', aborted_ttl_ms)
redis.call('DEL', SESSION, LOG, META)
return {'ok'}
