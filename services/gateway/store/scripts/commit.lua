-- Append tokens and their records to a log of expected_len tokens.
-- ARGV: epoch, nonce, expected_len, tokens, meta, ttl_ms, then name, value of each directory field.

local epoch, nonce, tokens, meta, ttl_ms = ARGV[1], ARGV[2], ARGV[4], ARGV[5], ARGV[6]

local refused = refusal(epoch, nonce)
if refused then return refused end

local have = redis.call('STRLEN', LOG)
local from = tonumber(ARGV[3]) * TOKEN_BYTES

if have < from then return {'behind', have / TOKEN_BYTES} end
if have > from then
  local there = redis.call('GETRANGE', LOG, from, from + #tokens - 1)
  if #tokens == 0 then there = '' end
  if there ~= string.sub(tokens, 1, #there) then return {'lost'} end
  if #there < #tokens then return {'behind', have / TOKEN_BYTES} end
  -- The log holds all of the tokens: this repeats a commit whose response was lost.
else
  redis.call('APPEND', LOG, tokens)
  redis.call('APPEND', META, meta)
  have = have + #tokens
end

if #ARGV > 6 then redis.call('HSET', SESSION, unpack(ARGV, 7)) end
touch(ttl_ms)
return {'ok', have / TOKEN_BYTES}
