-- Append tokens and their records to a log of expected_len tokens, whose hash changes from hash_before to
-- hash_after.
-- ARGV: epoch, nonce, expected_len, tokens, meta, hash_before, hash_after, ttl_ms,
--       then name, value of each directory field.

-- A commit postpones the expiry only if the last change was so long ago: three keys take a third of its time.
local TOUCH_MS = 100

local epoch, nonce, tokens, meta = ARGV[1], ARGV[2], ARGV[4], ARGV[5]
local hash_before, hash_after, ttl_ms = ARGV[6], ARGV[7], ARGV[8]

local refused, have, log_hash = refusal(epoch, nonce)
if refused then return refused end

local from = tonumber(ARGV[3]) * TOKEN_BYTES
if have < from then return {'behind', have / TOKEN_BYTES, log_hash} end
if have > from then
  local there = redis.call('GETRANGE', LOG, from, from + #tokens - 1)
  if #tokens == 0 then there = '' end
  if there ~= string.sub(tokens, 1, #there) then return {'lost'} end
  if #there < #tokens then return {'behind', have / TOKEN_BYTES, log_hash} end
  if have == from + #tokens and log_hash ~= hash_after then return {'lost'} end
  -- The log holds all of the tokens: this repeats a commit whose response was lost. It writes, so that WAIT
  -- waits for the first call's writes.
  if #ARGV > 8 then redis.call('HSET', SESSION, unpack(ARGV, 9)) end
  touch(ttl_ms)
else
  if log_hash ~= hash_before then return {'lost'} end
  have = redis.call('APPEND', LOG, tokens)
  redis.call('APPEND', META, meta)
  redis.call('HSET', SESSION, 'log_hash', hash_after, unpack(ARGV, 9))
  if redis.call('PTTL', SESSION) < ttl_ms - TOUCH_MS then touch(ttl_ms) end
end

return {'ok', have / TOKEN_BYTES}
