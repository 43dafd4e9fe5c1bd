-- Create a session, owned by `nonce`; if there is one already, change nothing and return it.
-- ARGV: latest_ms, principal, nonce, ttl_ms, finished_ttl_ms, body_hash, prompt_len, prompt, log_hash,
--       request_hash, then name, value of each field to store.

local latest_ms, principal, nonce, body_hash = ARGV[1], ARGV[2], ARGV[3], ARGV[6]
local ttl_ms, finished_ttl_ms = ARGV[4], ARGV[5]

if is_late(latest_ms) then return {'late'} end

local held = redis.call('HMGET', SESSION, 'principal', 'nonce', 'state', 'body_hash', 'prompt_len')
if not held[1] then
  redis.call('DEL', ABORTED) -- that was the session before: this one can be lost and recreated
  make(principal, 1, nonce, unpack(ARGV, 6))
else
  if held[1] ~= principal or held[4] ~= body_hash then return {'reused'} end
  if not whole(held[5]) then return {'lost'} end
  if held[2] ~= nonce then return with_session() end
  -- The same nonce: this repeats a create whose response was lost.
end

touch(held[3] == 'finished' and finished_ttl_ms or ttl_ms)
return with_session()
