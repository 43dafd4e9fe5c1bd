-- Return a session, and in how many ms it expires. Change nothing.
-- ARGV: principal.

if redis.call('HGET', SESSION, 'principal') ~= ARGV[1] then return {'unknown'} end
if not whole() then return {'lost'} end
local reply = with_session()
reply[5] = redis.call('PTTL', SESSION)
return reply
