-- Recreate, for its owner, a session that the store has lost.
-- ARGV: epoch, nonce, ttl_ms, principal, body_hash, prompt_len, prompt,
--       then name, value of each field to store.

local epoch, nonce, ttl_ms = ARGV[1], ARGV[2], ARGV[3]

if redis.call('EXISTS', SESSION) == 0 then
  -- Not lost: it was aborted, and a step of the clock has expired it.
  if redis.call('GET', ABORTED) == nonce then return {'ended'} end
  make(ARGV[4], epoch, nonce, unpack(ARGV, 5))
else
  -- This repeats a recreate whose response was lost, or another owner has created the session since.
  local refused = refusal(epoch, nonce)
  if refused then return refused end
end

touch(ttl_ms)
return {'ok'}
