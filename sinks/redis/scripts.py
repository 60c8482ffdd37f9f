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

# Further KEYS: the rows. The rest of ARGV: partition, from, until, 'json' or 'hash'. Then a value per row:
# its document, or its fields in MessagePack (field, value, ...), or '' for a delete. For a table with a
# `ttl` then the time at which each row expires, in milliseconds since 1970.
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
  local value = ARGV[first + 2 + i]
  if value == '' then
    gone[#gone + 1] = KEYS[i]
  elseif ARGV[first + 3] == 'hash' then
    redis.call('DEL', KEYS[i])
    redis.call('HSET', KEYS[i], unpack(cmsgpack.unpack(value)))
  else
    set[#set + 1] = KEYS[i]
    set[#set + 1] = value
  end
  n = n + 1
  if n % 2000 == 0 then flush() end
end
flush()
local expires = first + 2 + #KEYS
for i = expires + 1, #ARGV do redis.call('PEXPIREAT', KEYS[i - expires + 1], ARGV[i]) end
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

# ARGV: the database that readers see, the other one, then what was found in them when they were
# compared, as JSON: [{database, key, fields}]; the text of a field that isn't there is ''. 0 when
# something has moved since.
UNMOVED = """
for _, found in ipairs(cjson.decode(ARGV[3])) do
  redis.call('SELECT', found.database)
  for field, value in pairs(found.fields) do
    if (redis.call('HGET', found.key, field) or '') ~= value then return 0 end
  end
end
"""

EXCHANGE_DATABASES = (
    UNMOVED
    + """
redis.call('SWAPDB', ARGV[1], ARGV[2])
return 1
"""
)

# Exchanges positions; rows follow by `EXCHANGE_SOME`. The rest of ARGV: the mark of this exchange, then
# as JSON the offsets that positions show readers meanwhile, as texts: [{key, shown}]. `ahead` has those
# of the new rows.
EXCHANGE_POSITIONS = (
    UNMOVED
    + """
for _, begun in ipairs(cjson.decode(ARGV[5])) do
  local positions = {}
  for place = 1, 2 do
    redis.call('SELECT', ARGV[place])
    positions[place] = redis.call('HGETALL', begun.key)
    redis.call('DEL', begun.key)
  end
  for place = 1, 2 do
    redis.call('SELECT', ARGV[place])
    redis.call('HSET', begun.key, 'exchange', ARGV[4], unpack(positions[3 - place]))
  end
  redis.call('SELECT', ARGV[1])
  local ahead = {}
  for i, offset in ipairs(begun.shown) do
    ahead[i] = redis.call('HGET', begun.key, i - 1) or '0'
    redis.call('HSET', begun.key, i - 1, offset)
  end
  redis.call('HSET', begun.key, 'ahead', cjson.encode(ahead))
end
return 1
"""
)

# Exchanges rows that haven't changed places yet, each with the row of the same key in the other database,
# together with the time at which it expires.
# KEYS: position, the set of rows that are exchanged. ARGV: the mark of the exchange, the database that
# readers see, the other one. -1 when that exchange is over.
EXCHANGING = """
redis.call('SELECT', ARGV[2])
if redis.call('HGET', KEYS[1], 'exchange') ~= ARGV[1] then return -1 end
local bytes = 0
local function change_places(rows)
  local function read(database)
    redis.call('SELECT', database)
    local values = {}
    for i, row in ipairs(rows) do
      local value = redis.call('DUMP', row)
      values[i] = value and redis.call('PEXPIRETIME', row) .. value
    end
    return values
  end
  local there = read(ARGV[3])
  local here = read(ARGV[2])
  local function aside(i) return KEYS[2] .. ':' .. i end
  local marks = {}
  for i, row in ipairs(rows) do
    bytes = bytes + #(here[i] or '')
    if here[i] ~= there[i] and redis.call('SADD', KEYS[2], row) == 1 then marks[#marks + 1] = i end
  end
  for _, i in ipairs(marks) do if here[i] then redis.call('RENAME', rows[i], aside(i)) end end
  redis.call('SELECT', ARGV[3])
  for _, i in ipairs(marks) do if there[i] then redis.call('MOVE', rows[i], ARGV[2]) end end
  redis.call('SELECT', ARGV[2])
  for _, i in ipairs(marks) do if here[i] then redis.call('MOVE', aside(i), ARGV[3]) end end
  redis.call('SELECT', ARGV[3])
  for _, i in ipairs(marks) do if here[i] then redis.call('RENAME', aside(i), rows[i]) end end
  redis.call('SELECT', ARGV[2])
end
"""

# The rest of ARGV: a database, the pattern of keys of rows there, a cursor of SCAN, and a count of keys.
# First comes the database that readers see, so that in the other one only rows without a counterpart are
# left. Returns the next cursor, and the bytes of the rows in the database that readers see.
EXCHANGE_SOME = (
    EXCHANGING
    + """
redis.call('SELECT', ARGV[4])
local found = redis.call('SCAN', ARGV[6], 'MATCH', ARGV[5], 'COUNT', ARGV[7])
local rows = found[2]
if ARGV[4] ~= ARGV[2] then
  redis.call('SELECT', ARGV[2])
  rows = {}
  for _, row in ipairs(found[2]) do
    if redis.call('EXISTS', row) == 0 then rows[#rows + 1] = row end
  end
end
change_places(rows)
return {found[1], bytes}
"""
)

# Ends an exchange whose rows are all exchanged: from now on readers see the position of
# the rows. The rest of ARGV: the run_id of the server that has exchanged them, '' if it isn't known. 0
# on another server, where some may be left.
SETTLE = (
    EXCHANGING
    + """
if ARGV[4] ~= '' and not string.find(redis.call('INFO', 'server'), ARGV[4], 1, true) then return 0 end
local ahead = cjson.decode(redis.call('HGET', KEYS[1], 'ahead') or '[]')
for i, offset in ipairs(ahead) do redis.call('HSET', KEYS[1], i - 1, offset) end
redis.call('HDEL', KEYS[1], 'exchange', 'ahead')
redis.call('UNLINK', KEYS[2])
redis.call('SELECT', ARGV[3])
redis.call('HDEL', KEYS[1], 'exchange')
return 1
"""
)
