-- Return a session, and in how many ms it expires. Change nothing.
-- ARGV: principal.

local held = redis.call('HMGET', SESSION, 'principal', 'prompt_len')
if held[1] ~= ARGV[1] then return {'unknown'} end
if not whole(held[2]) then return {'lost'} end
local reply = with_session()
reply[5] = redis.call('PTTL', SESSION)
return reply
