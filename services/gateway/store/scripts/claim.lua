-- Take over a session from the owner that the caller has read, and from no other.
-- ARGV: latest_ms, principal, epoch and nonce of that owner, nonce, ttl_ms, finished_ttl_ms.

local latest_ms, principal, epoch, former, nonce = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local ttl_ms, finished_ttl_ms = ARGV[6], ARGV[7]

if is_late(latest_ms) then return {'late'} end

local held = redis.call('HMGET', SESSION, 'principal', 'epoch', 'nonce', 'state', 'prompt_len')
if held[1] ~= principal then return {'unknown'} end
if not whole(held[5]) then return {'lost'} end
-- A call with the same nonce repeats a claim whose response was lost.
if held[3] ~= nonce then
  if held[2] ~= epoch or held[3] ~= former then return {'changed'} end
  redis.call('HINCRBY', SESSION, 'epoch', 1)
  redis.call('HSET', SESSION, 'nonce', nonce, 'claimed_ms', string.format('%d', now_ms()))
end

touch(held[4] == 'finished' and finished_ttl_ms or ttl_ms)
return with_session()
