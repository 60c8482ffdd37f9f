"""Scripts that run inside the cache's server, one at a time: each compares a position before it
changes it.

A position is a hash; KEYS[1] is its key. Integers stay text, because Lua's numbers are doubles. Lua
unpacks 8,000 values at most. The generation is always compared as well: once two generations have
changed places, the other one's positions lie here.
"""

# Only the writer that a position names moves it, so a stopped writer that goes on fails. ARGV:
# writer, generation, topic id, then partition and offset of each, as they were read. Returns the
# number of this takeover, 0 when they have changed since. A number that is less later on shows that
# the server has gone back; no other writer makes it less.
TAKE = """
local at = redis.call('HMGET', KEYS[1], 'generation', 'topic_id')
if (at[1] or '') ~= ARGV[2] or (at[2] or '') ~= ARGV[3] then return 0 end
for i = 4, #ARGV, 2 do
  if (redis.call('HGET', KEYS[1], ARGV[i]) or '0') ~= ARGV[i + 1] then return 0 end
end
redis.call('HSET', KEYS[1], 'writer', ARGV[1])
return redis.call('HINCRBY', KEYS[1], 'takeovers', 1)
"""

# ARGV of what moves a position: topic id, writer, generation, time, partition count, how many
# values follow that are stored as they are, and these values: field, value, ... `first` is where
# the rest begins.
MOVING = """
local first = 7 + tonumber(ARGV[6])
local at = redis.call('HMGET', KEYS[1], 'topic_id', 'writer', 'generation')
local held = (not at[1] or at[1] == ARGV[1]) and at[2] == ARGV[2] and (at[3] or '') == ARGV[3]
local function offset(partition) return redis.call('HGET', KEYS[1], partition) or '0' end
local function moved(partition)
  local takeovers = redis.call('HGET', KEYS[1], 'takeovers') or '0'
  return {'moved', at[1] or '', at[2] or '', offset(partition), at[3] or '', takeovers, partition}
end
local function store(n)
  redis.call('HSET', KEYS[1], 'topic_id', ARGV[1], 'at', ARGV[4], 'partitions', ARGV[5], unpack(ARGV, 7, first - 1))
  redis.call('HINCRBY', KEYS[1], 'rows', n)
end
"""

# Further KEYS: the rows. The rest of ARGV: partition, from, until, then a document per row, '' for
# a delete.
APPLY = (
    MOVING
    + """
if not held or offset(ARGV[first]) ~= ARGV[first + 1] then return moved(ARGV[first]) end
local set, gone, n = {}, {}, 0
local function flush()
  if #set > 0 then redis.call('MSET', unpack(set)) end
  if #gone > 0 then redis.call('DEL', unpack(gone)) end
  set, gone = {}, {}
end
for i = 2, #KEYS do
  local value = ARGV[first + 1 + i]
  if value == '' then gone[#gone + 1] = KEYS[i] else set[#set + 1] = KEYS[i]; set[#set + 1] = value end
  n = n + 1
  if n % 2000 == 0 then flush() end
end
flush()
redis.call('HSET', KEYS[1], ARGV[first], ARGV[first + 2])
store(n)
return {'ok'}
"""
)

# The rest of ARGV: partition, from, until, ... `from` is how far executors have moved it in this
# batch, if at all. Where it is less by now, the server has lost rows.
FINISH = (
    MOVING
    + """
local function below(a, b) return #a < #b or (#a == #b and a < b) end
for i = first, #ARGV, 3 do
  local now = offset(ARGV[i])
  if not held or below(now, ARGV[i + 1]) or below(ARGV[i + 2], now) then return moved(ARGV[i]) end
end
for i = first, #ARGV, 3 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2]) end
store(0)
return {'ok'}
"""
)

# Further KEYS: rows to remove. ARGV: generation, and if the position goes as well, 'position' and
# which generation is there from then on, if any. 0 when the rows are another generation's: the two
# have changed places.
REMOVE = """
local generation = redis.call('HGET', KEYS[1], 'generation') or ''
if generation ~= ARGV[1] then return 0 end
if #KEYS > 1 then redis.call('UNLINK', unpack(KEYS, 2)) end
if ARGV[2] == 'position' then redis.call('DEL', KEYS[1]) end
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'generation', ARGV[3]) end
return 1
"""

# ARGV: two databases, then what was found in them when they were compared, as JSON: [{database,
# key, fields}]; the text of a field that isn't there is ''. 0 when something has moved since.
EXCHANGE = """
for _, found in ipairs(cjson.decode(ARGV[3])) do
  redis.call('SELECT', found.database)
  for field, value in pairs(found.fields) do
    if (redis.call('HGET', found.key, field) or '') ~= value then return 0 end
  end
end
redis.call('SWAPDB', ARGV[1], ARGV[2])
return 1
"""
