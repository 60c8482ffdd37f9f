"""Scripts of the state. Each compares before it changes, and is one step for readers and crashes."""

# KEYS: pending, number. ARGV: the chunk's number, then dirty set, id, ... 0 when the chunk is
# forgotten already.
CLIMBED = """
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
local number = redis.call('INCR', KEYS[2])
for i = 2, #ARGV, 2 do redis.call('ZADD', ARGV[i], number, ARGV[i + 1]) end
return 1
"""

# KEYS: dirty set, number. ARGV: ids, a page.
MARK_ROWS = """
local marks = {}
local number = redis.call('INCR', KEYS[2])
for i = 1, #ARGV do marks[2 * i - 1], marks[2 * i] = number, ARGV[i] end
return redis.call('ZADD', KEYS[1], unpack(marks))
"""

# KEYS: dirty set, deleted rows, number; digests, if the documents are to be sent whatever the topic
# has: no document has an empty digest. One that is final stays it (`cdc.documents.closing.SAID`). ARGV:
# id, the connector's key, ... The key is needed only where there is no row.
MARK = """
local number = redis.call('INCR', KEYS[3])
for i = 1, #ARGV, 2 do
  redis.call('ZADD', KEYS[1], number, ARGV[i])
  redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
  if KEYS[4] and redis.call('HGET', KEYS[4], ARGV[i]) ~= 'final' then redis.call('HSET', KEYS[4], ARGV[i], '') end
end
return 1
"""

# KEYS: documents. ARGV: owner. Returns the number of its turn. The new owner reads from the topic what
# an open transaction has come to.
TAKE_TURN = """
redis.call('HSET', KEYS[1], 'owner', ARGV[1])
if tonumber(redis.call('HGET', KEYS[1], 'sending') or 0) % 2 == 1 then redis.call('HINCRBY', KEYS[1], 'sending', 1) end
return redis.call('HINCRBY', KEYS[1], 'turn', 1)
"""

# Precedes all scripts below but `SEE`. KEYS: documents. ARGV: owner, turn. A later turn is of another
# run; an earlier one of a state that has gone back.
DURING_TURN = """
local held = redis.call('HMGET', KEYS[1], 'owner', 'turn')
if tonumber(held[2] or 0) < tonumber(ARGV[2]) then return 'rewound' end
if held[1] ~= ARGV[1] or held[2] ~= ARGV[2] then return 'fenced' end
"""

# The rest of ARGV: fields to set.
WHILE_TURN = """
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 'ok'
"""

# The rest of ARGV: the number of a transaction.
BEGIN_SENDING = """
if tonumber(redis.call('HGET', KEYS[1], 'sending') or 0) ~= tonumber(ARGV[3]) then return 'unsettled' end
redis.call('HINCRBY', KEYS[1], 'sending', 1)
return 'ok'
"""

# `note_digests` stores what ARGV says from a place on: id, digest, ...; '' for a document that the topic
# lacks.
DIGESTS = """
local function note_digests(key, first)
  for i = first, #ARGV, 2 do
    if ARGV[i + 1] == '' then
      redis.call('HDEL', key, ARGV[i])
    else
      redis.call('HSET', key, ARGV[i], ARGV[i + 1])
    end
  end
end
"""

# More KEYS: digests. The rest of ARGV: the digests.
NOTE_DIGESTS = f"{DIGESTS}note_digests(KEYS[2], 3)\nreturn 'ok'"

# More KEYS: digests, the hash of closed windows. The rest of ARGV: the view.
FORGET_DIGESTS = """
redis.call('UNLINK', KEYS[2])
redis.call('HDEL', KEYS[3], ARGV[3])
return 'ok'
"""

# More KEYS: dirty set, deleted rows, unsent, due set, digests, panes to drop. The rest of ARGV: a number of ids, the
# ids, then a mark for each, then for each when it is due, '' for never. An id that has been marked again
# stays. Then the digests of what was sent.
SENT = (
    DIGESTS
    + """
local count = tonumber(ARGV[3])
for i = 7, #KEYS do redis.call('UNLINK', KEYS[i]) end
note_digests(KEYS[6], 3 * count + 4)
if tonumber(redis.call('HGET', KEYS[1], 'sending') or 0) % 2 == 1 then redis.call('HINCRBY', KEYS[1], 'sending', 1) end
if count == 0 then return 'ok' end
redis.call('SREM', KEYS[4], KEYS[2])
local marks, done = redis.call('ZMSCORE', KEYS[2], unpack(ARGV, 4, count + 3)), {}
for i = 1, count do
  if marks[i] and tonumber(marks[i]) == tonumber(ARGV[count + 3 + i]) then
    local id = ARGV[i + 3]
    local due = ARGV[2 * count + 3 + i]
    done[#done + 1] = id
    if due == '' then redis.call('ZREM', KEYS[5], id) else redis.call('ZADD', KEYS[5], due, id) end
  end
end
if #done > 0 then
  redis.call('ZREM', KEYS[2], unpack(done))
  redis.call('HDEL', KEYS[3], unpack(done))
end
return 'ok'
"""
)

# `keep_latest` stores what ARGV says from a place on: view, time, ...; a time that is later stays.
LATEST = """
local function keep_latest(key, first)
  for i = first, #ARGV, 2 do
    local held = redis.call('HGET', key, ARGV[i])
    if not held or tonumber(held) < tonumber(ARGV[i + 1]) then redis.call('HSET', key, ARGV[i], ARGV[i + 1]) end
  end
end
"""

# KEYS: the hash of times that views have seen. ARGV: the times.
SEE = f"{LATEST}keep_latest(KEYS[1], 1)\nreturn 1"

# More KEYS: clocks. The rest of ARGV: the times.
ADVANCE = f"{LATEST}keep_latest(KEYS[2], 3)\nreturn 'ok'"

# More KEYS: due set, dirty set, number. The rest of ARGV: the time, a page. Returns how many were
# due.
RIPEN = """
local ids = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', ARGV[3], 'LIMIT', 0, ARGV[4])
if #ids == 0 then return 0 end
local marks = {}
local number = redis.call('INCR', KEYS[4])
for i = 1, #ids do marks[2 * i - 1], marks[2 * i] = number, ids[i] end
redis.call('ZADD', KEYS[3], unpack(marks))
redis.call('ZREM', KEYS[2], unpack(ids))
return #ids
"""
