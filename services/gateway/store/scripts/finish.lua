-- End a session, called by its owner.
-- ARGV: epoch, nonce, expected_len, finish, log_hash, finished_ttl_ms.

local epoch, nonce, finish, log_hash, finished_ttl_ms = ARGV[1], ARGV[2], ARGV[4], ARGV[5], ARGV[6]

local held = redis.call('HMGET', SESSION, 'epoch', 'nonce', 'state', 'finish')
local mine = held[1] == epoch and held[2] == nonce
-- This repeats a finish whose response was lost. It writes, so that WAIT waits for the first call's writes.
if mine and held[3] == 'finished' and held[4] == finish then
  touch(finished_ttl_ms)
  return {'ok'}
end

local refused, have, held_hash = refusal(epoch, nonce)
if refused then return refused end

local want = tonumber(ARGV[3]) * TOKEN_BYTES
if have < want then return {'behind', have / TOKEN_BYTES, held_hash} end
if have > want or held_hash ~= log_hash then return {'lost'} end

redis.call('HSET', SESSION, 'state', 'finished', 'finish', finish)
trim()
touch(finished_ttl_ms)
return {'ok'}
