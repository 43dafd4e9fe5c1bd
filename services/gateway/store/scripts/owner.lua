-- Put before every other script. KEYS of all: the session's hash, its log, its meta. KEYS of create, abort,
-- delete and recreate also: a key that exists if the session was aborted or deleted.
-- A refusal is a list whose first element names it.

local SESSION, LOG, META, ABORTED = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local TOKEN_BYTES = 4

local function touch(ttl_ms)
  for _, key in ipairs({SESSION, LOG, META}) do redis.call('PEXPIRE', key, ttl_ms) end
end

-- Free the memory that the strings reserve for appending: the session has ended.
local function trim()
  for _, key in ipairs({LOG, META}) do redis.call('SET', key, redis.call('GET', key)) end
end

-- Return the length of the log in bytes if it holds the prompt and whole tokens, and the meta exists; else nil.
-- All keys change together, so only eviction, corruption or another client can cause anything else.
local function whole(prompt_len)
  prompt_len = tonumber(prompt_len)
  local bytes = redis.call('STRLEN', LOG)
  if prompt_len == nil or bytes < prompt_len * TOKEN_BYTES or bytes % TOKEN_BYTES ~= 0 then return nil end
  if redis.call('EXISTS', META) ~= 1 then return nil end
  return bytes
end

-- Return the time of this server in ms.
local function now_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end

-- Return true once the caller has given up: the call must not change anything any more.
local function is_late(latest_ms)
  return now_ms() > tonumber(latest_ms)
end

-- Create a session whose log is its prompt.
-- `...`: body_hash, prompt_len, prompt, log_hash, request_hash, then name, value of each field to store.
local function make(principal, epoch, nonce, body_hash, prompt_len, prompt, log_hash, request_hash, ...)
  local now = string.format('%d', now_ms())
  redis.call('DEL', LOG, META)
  redis.call('HSET', SESSION, 'principal', principal, 'body_hash', body_hash, 'prompt_len', prompt_len,
    'log_hash', log_hash, 'request_hash', request_hash, 'epoch', epoch, 'nonce', nonce, 'state', 'live',
    'finish', '', 'created_ms', now, 'claimed_ms', now, ...)
  redis.call('SET', LOG, prompt)
  redis.call('SET', META, '')
end

-- Return 'ok' and the whole session.
local function with_session()
  return {'ok', redis.call('HGETALL', SESSION), redis.call('GET', LOG), redis.call('GET', META)}
end

-- Return nil, the length of the log in bytes and its hash if (epoch, nonce) is the owner and may change the
-- session, else the refusal; 'fenced' comes with the current epoch.
local function refusal(epoch, nonce)
  local held = redis.call('HMGET', SESSION, 'epoch', 'nonce', 'state', 'prompt_len', 'log_hash')
  if not held[1] then return {'unknown'} end
  -- Checked before 'ended', from which only the last owner may conclude how the session ended.
  if held[1] ~= epoch or held[2] ~= nonce then return {'fenced', held[1]} end
  if held[3] == 'finished' then return {'ended'} end
  local bytes = whole(held[4])
  if not bytes then return {'lost'} end
  return nil, bytes, held[5]
end
