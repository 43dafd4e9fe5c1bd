-- Claim a session; with body_hash, create it if there is none.
-- ARGV: principal, nonce, ttl_ms, finished_ttl_ms, body_hash ('' = must exist), prompt_len, prompt,
--       then name, value of each field to store.

local principal, nonce, ttl_ms, finished_ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local body_hash, prompt_len, prompt = ARGV[5], ARGV[6], ARGV[7]
local creating = body_hash ~= ''

local held = redis.call('HMGET', SESSION, 'principal', 'nonce', 'state', 'body_hash')

if not held[1] then
  if not creating then return {'unknown'} end
  make(principal, 1, nonce, body_hash, prompt_len, prompt, unpack(ARGV, 8))
else
  if creating and (held[1] ~= principal or held[4] ~= body_hash) then return {'reused'} end
  if held[1] ~= principal then return {'unknown'} end
  if not whole() then return {'lost'} end
  -- A call with the same nonce repeats a claim whose response was lost.
  if held[2] ~= nonce then
    redis.call('HINCRBY', SESSION, 'epoch', 1)
    redis.call('HSET', SESSION, 'nonce', nonce)
  end
end

touch(held[3] == 'finished' and finished_ttl_ms or ttl_ms)
return {'ok', redis.call('HGETALL', SESSION), redis.call('GET', LOG), redis.call('GET', META)}
