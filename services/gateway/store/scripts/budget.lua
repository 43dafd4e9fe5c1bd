-- Change a token bucket: return tokens, take what a call needs, lease some ahead.
-- The bucket fills on this server's clock. One that does not exist is full; so it expires once it is full again.
-- KEYS: the bucket. ARGV: tokens per second, burst, returned (negative: charged), needed (-1: no call waits), ahead.
-- Returns 1 if the call was granted, the number of tokens leased, and what the bucket holds then.

local per_s, burst, returned = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local needed, ahead = tonumber(ARGV[4]), tonumber(ARGV[5])
-- Rounding of floats, in tokens.
local ROUNDING = 0.000001
local LONGEST_MS = 100000000000000

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local held = redis.call('HMGET', KEYS[1], 'level', 'at_us')
local level = burst
if held[1] then
  level = tonumber(held[1]) + math.max(0, now_us - tonumber(held[2])) / 1000000 * per_s
end
level = math.min(burst, math.min(burst, level) + returned)

local granted, leased = 0, 0
if needed >= 0 and level >= math.min(needed, burst) - ROUNDING then
  granted = 1
  level = level - needed
end
if granted == 1 or needed < 0 then
  leased = math.max(0, math.min(ahead, math.floor(level + ROUNDING)))
  level = level - leased
end

local full_ms = math.min(LONGEST_MS, (burst - level) / per_s * 1000)
level = string.format('%.17g', level)
redis.call('HSET', KEYS[1], 'level', level, 'at_us', string.format('%.0f', now_us))
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', full_ms + 1000))
return {granted, leased, level}
