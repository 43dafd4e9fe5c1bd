-- Return a session and change nothing.
-- ARGV: principal.

if redis.call('HGET', SESSION, 'principal') ~= ARGV[1] then return {'unknown'} end
if not whole() then return {'lost'} end
return with_session()
