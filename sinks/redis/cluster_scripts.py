"""Scripts for a cluster, where a script reaches the keys of one slot.

What a slot has is one step: rows, and beside them how far each partition is applied in this slot. A
position comes after the rows of all slots. Each node has a copy of it, in a slot of that node, so
that a node that loses its last writes loses its copy's last steps as well. Integers stay text, as in
`scripts`.
"""

BELOW = """
local function below(a, b) return #a < #b or (#a == #b and a < b) end
"""

# Another history of a node's data has another name: after a restart, and after a replica has taken over.
HISTORY = """
local function history()
  return string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
end
"""

# KEYS[1]: what is applied in this slot, a hash: by partition, the offset below which all changes are
# applied, and `epoch`: number of the takeover that has written here last. Further KEYS: rows. ARGV:
# epoch, the one since which this slot's hash is trusted, partition, a position or '' and 'json' or
# 'hash'. Then per row the offset behind its newest change, and its value as for `scripts.APPLY`; for a
# table with a `ttl` then the times at which the rows expire. Rows below what is applied stay. With a
# position, all rows below it are written once more. Returns the numbers of the rows that stay.
WRITE = (
    BELOW
    + """
local at = redis.call('HMGET', KEYS[1], 'epoch', ARGV[3])
local epoch, applied = at[1] or '0', at[2] or '0'
if below(ARGV[1], epoch) then return redis.error_reply('-FENCED by a later takeover') end
if below(epoch, ARGV[2]) then
  redis.call('DEL', KEYS[1])
  applied = '0'
end
local position = ARGV[4]
if position ~= '' and below(position, applied) then return redis.error_reply('-PASSED by later changes') end
local rows = #KEYS - 1
local stay, most = {}, applied
if below(most, position) then most = position end
for i = 1, rows do
  local key, behind, value = KEYS[i + 1], ARGV[4 + 2 * i], ARGV[5 + 2 * i]
  if position == '' and not below(applied, behind) then
    stay[#stay + 1] = i
  else
    if value == '' then
      redis.call('DEL', key)
    elseif ARGV[5] == 'hash' then
      redis.call('DEL', key)
      redis.call('HSET', key, unpack(cmsgpack.unpack(value)))
    else
      redis.call('SET', key, value)
    end
    local expires = ARGV[5 + 2 * rows + i]
    if expires then redis.call('PEXPIREAT', key, expires) end
    if below(most, behind) then most = behind end
  end
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], ARGV[3], most)
return stay
"""
)

# KEYS[1]: a copy of a position. Returns its fields, then the name of the node's history.
READ = (
    HISTORY
    + """
local fields = redis.call('HGETALL', KEYS[1])
fields[#fields + 1] = 'now'
fields[#fields + 1] = history()
return fields
"""
)

# ARGV: epoch of this takeover, how many values follow that the copy must have (field, value, ...; ''
# for none), these, then the fields that it has from now on. What the node's slots say is applied is
# trusted as before if its history is the same, else from this epoch on. Returns that epoch; nothing if
# another one has been here.
TAKE = (
    BELOW
    + HISTORY
    + """
local first = 3 + tonumber(ARGV[2])
local function at(field) return redis.call('HGET', KEYS[1], field) or '' end
if not below(at('takeovers'), ARGV[1]) then return nil end
for i = 3, first - 1, 2 do
  if at(ARGV[i]) ~= ARGV[i + 1] then return nil end
end
local trusted = ARGV[1]
if at('history') == history() then trusted = at('trusted') end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'takeovers', ARGV[1], 'history', history(), 'trusted', trusted, unpack(ARGV, first))
return trusted
"""
)

# ARGV: writer, epoch, how many partitions follow (partition, from, until, ...), these, then fields
# and values to store. 'lost' on a node that isn't what it was when the writer took over, or that is
# before `from`; 'fenced' where another writer has taken over.
MOVE = (
    BELOW
    + HISTORY
    + """
local at = redis.call('HMGET', KEYS[1], 'writer', 'takeovers', 'history')
if not at[2] or below(at[2], ARGV[2]) or (at[2] == ARGV[2] and at[3] ~= history()) then return 'lost' end
if at[1] ~= ARGV[1] or at[2] ~= ARGV[2] then return 'fenced' end
local first = 4 + 3 * tonumber(ARGV[3])
for i = 4, first - 1, 3 do
  local now = redis.call('HGET', KEYS[1], ARGV[i]) or '0'
  if below(now, ARGV[i + 1]) then return 'lost' end
  if below(ARGV[i + 2], now) then return 'fenced' end
end
for i = 4, first - 1, 3 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2]) end
redis.call('HSET', KEYS[1], unpack(ARGV, first))
return 'ok'
"""
)

# KEYS[1]: the catalog. ARGV: field, its value, the one that it gets, ...; '' for none. 0 when one has
# another value.
CHANGE = """
for i = 1, #ARGV, 3 do
  if (redis.call('HGET', KEYS[1], ARGV[i]) or '') ~= ARGV[i + 1] then return 0 end
end
for i = 1, #ARGV, 3 do
  if ARGV[i + 2] == '' then
    redis.call('HDEL', KEYS[1], ARGV[i])
  else
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2])
  end
end
return 1
"""
