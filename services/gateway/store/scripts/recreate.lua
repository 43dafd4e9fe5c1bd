-- Recreate, for its owner, a session that the store has lost.
-- ARGV: epoch, nonce, latest_ms, ttl_ms, principal, body_hash, prompt_len, prompt, log_hash, request_hash,
--       then name, value of each field to store.

local epoch, nonce, latest_ms, ttl_ms, principal = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

if is_late(latest_ms) then return {'late'} end

if redis.call('EXISTS', SESSION) == 0 then
  -- Not lost: it was aborted, and a step of the clock has expired it.
  if redis.call('EXISTS', ABORTED) == 1 then return {'ended'} end
  make(principal, epoch, nonce, unpack(ARGV, 6))
else
  -- This repeats a recreate whose response was lost, or another owner has created the session since.
  local refused = refusal(epoch, nonce)
  if refused then return refused end
end

touch(ttl_ms)
return {'ok'}
