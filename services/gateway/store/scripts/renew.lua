-- Postpone the expiry of a session.
-- ARGV: epoch, nonce, ttl_ms.

local refused = refusal(ARGV[1], ARGV[2])
if refused then return refused end
touch(ARGV[3])
return {'ok'}
