"""Scripts of the state. Each compares before it changes, and is one step for readers and crashes."""

from cdc.sinks.redis.scripts import MOVING

# `change(i)` makes one row what ARGV says from i on: id, entries, key, row; '' deletes. What stood
# there before is undone: the entries of the former row alone. An entry of a pane that is closed by
# the view's clock is neither done nor undone, but added to `late`: once for a change, pane and view.
# ARGV from `fixed` on: the prefixes of rows and of index sets, '1' if other tables' documents hold
# these rows, the hash of clocks, how many views have the table as their root, and for each of these
# its dirty set and its hash of deleted rows.
CHANGING = """
local GS, RS, US = '\\29', '\\30', '\\31'
local R, X, pends, views = ARGV[fixed], ARGV[fixed + 1], ARGV[fixed + 2] == '1', tonumber(ARGV[fixed + 4])
local roots = fixed + 5
local rows = roots + 2 * views
local number, pending, bytes, count, changed = nil, {}, 0, 0, {}
local clocks, refused, late = {}, {}, {}
-- What the rows' entries come to, by key: members of sets and of lists, and sums of tallies by field. Rows of
-- one chunk often share a pane or a parent, and a call costs more than what it does.
local added, removed, listed, unlisted, sums = {}, {}, {}, {}, {}
local function is_closed(view, time)
  if clocks[view] == nil then clocks[view] = tonumber(redis.call('HGET', ARGV[fixed + 3], view) or -math.huge) end
  return time <= clocks[view]
end
local function put(members, key, ...)
  local all = members[key]
  if not all then all = {}; members[key] = all end
  for _, member in ipairs({...}) do all[#all + 1] = member end
end
local function add(tally, field, amount)
  local fields = sums[tally]
  if not fields then fields = {}; sums[tally] = fields end
  fields[field] = (fields[field] or 0) + amount
end
-- `sign`: 1 does an entry, -1 undoes it.
local function enter(entry, id, sign)
  local kind = string.byte(entry)
  if kind == 119 then
    local a = string.find(entry, GS, 1, true)
    local b = string.find(entry, GS, a + 1, true)
    local view, time = string.sub(entry, 2, a - 1), tonumber(string.sub(entry, a + 1, b - 1))
    entry = string.sub(entry, b + 1)
    kind = string.byte(entry)
    if is_closed(view, time) then
      local pane = string.match(entry, '^[^' .. GS .. ']*' .. GS .. '([^' .. GS .. ']*)')
      if not refused[view .. GS .. pane] then late[#late + 1] = {view, id, pane} end
      refused[view .. GS .. pane] = true
      return
    end
  end
  if kind == 108 then
    local ends = string.find(entry, GS, string.find(entry, GS, 1, true) + 1, true)
    local list, member = X .. string.sub(entry, 1, ends - 1), string.sub(entry, ends + 1) .. ' ' .. id
    if sign == 1 then put(listed, list, 0, member) else put(unlisted, list, member) end
  elseif kind == 99 then
    local parts = {}
    for part in string.gmatch(entry .. GS, '([^' .. GS .. ']*)' .. GS) do parts[#parts + 1] = part end
    local tally = X .. parts[1] .. GS .. parts[2]
    add(tally, 'n', sign)
    for i = 3, #parts do
      if parts[i] ~= '' then
        local sum, amount = 's' .. (i - 3), tonumber(parts[i])
        add(tally, 'c' .. (i - 3), sign)
        if amount then add(tally, sum, sign * amount) end
        for name, part in string.gmatch(parts[i], '([^,:]+):([^,]+)') do
          add(tally, sum .. ':' .. name, sign * tonumber(part))
        end
      end
    end
  elseif sign == 1 then
    put(added, X .. entry, id)
  else
    put(removed, X .. entry, id)
  end
end
local function change(i)
  local id, entries, key, row = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local old, new
  if row == '' then
    old, entries = redis.call('GETDEL', R .. id), ''
  else
    new = entries .. RS .. key .. RS .. row
    old = redis.call('SET', R .. id, new, 'GET')
  end
  if old == (new or false) then return end
  number = number or redis.call('INCR', KEYS[2])
  local before = ''
  if old then
    local a = string.find(old, RS, 1, true)
    before = string.sub(old, 1, a - 1)
    if not new then key = string.sub(old, a + 1, string.find(old, RS, a + 1, true) - 1) end
    bytes, count = bytes - #old, count - 1
  end
  if new then bytes, count = bytes + #new, count + 1 end
  if before ~= entries then
    local undone = {}
    refused = {}
    for entry in string.gmatch(before, '[^' .. US .. ']+') do undone[entry] = true end
    for entry in string.gmatch(entries, '[^' .. US .. ']+') do
      if undone[entry] then undone[entry] = nil else enter(entry, id, 1) end
    end
    for entry in pairs(undone) do enter(entry, id, -1) end
  end
  changed[#changed + 1] = number
  changed[#changed + 1] = id
  if not new then
    for v = 0, views - 1 do redis.call('HSET', ARGV[roots + 1 + 2 * v], id, key) end
  end
  if pends then
    pending[#pending + 1] = id
    pending[#pending + 1] = before
  end
end
-- Does at once what the rows have in common. A row is in a chunk once, so no member is both added and removed.
local function finish(table)
  for key, ids in pairs(removed) do redis.call('SREM', key, unpack(ids)) end
  for key, ids in pairs(added) do redis.call('SADD', key, unpack(ids)) end
  for key, members in pairs(unlisted) do redis.call('ZREM', key, unpack(members)) end
  for key, members in pairs(listed) do redis.call('ZADD', key, unpack(members)) end
  for tally, fields in pairs(sums) do
    for field, amount in pairs(fields) do
      if amount ~= 0 and redis.call('HINCRBY', tally, field, string.format('%d', amount)) == 0 then
        redis.call('HDEL', tally, field)
      end
    end
  end
  if #changed > 0 then
    for v = 0, views - 1 do redis.call('ZADD', ARGV[roots + 2 * v], unpack(changed)) end
  end
  if #pending > 0 then redis.call('HSET', KEYS[3], number, cmsgpack.pack({table, pending})) end
end
"""

MOST_LATE = 1000
"""Late changes that are listed of a view; all are counted."""

# KEYS: position, number, pending, unsent, late changes. The rest of ARGV: partition, from, until, the
# table's name, then what `CHANGING` takes.
APPLY = (
    MOVING
    + """
if not held or offset(ARGV[first]) ~= ARGV[first + 1] then return moved(ARGV[first]) end
local fixed = first + 4
"""
    + f"local most_late = {MOST_LATE}\n"
    + CHANGING
    + """
local n = 0
for i = rows, #ARGV, 4 do change(i); n = n + 1 end
finish(ARGV[first + 3])
-- Without a topic's id nothing has been stored: all rows are these, and dirty.
if not at[1] then
  for v = 0, views - 1 do redis.call('SADD', KEYS[4], ARGV[roots + 2 * v]) end
end
for _, one in ipairs(late) do
  local list = KEYS[5] .. ':' .. one[1]
  redis.call('HINCRBY', KEYS[5], one[1], 1)
  redis.call('LPUSH', list, cmsgpack.pack({one[2], one[3], ARGV[4]}))
  redis.call('LTRIM', list, 0, most_late - 1)
end
redis.call('HSET', KEYS[1], ARGV[first], ARGV[first + 2])
redis.call('HINCRBY', KEYS[1], 'state_rows', count)
redis.call('HINCRBY', KEYS[1], 'state_bytes', bytes)
store(n)
return {'ok'}
"""
)

# KEYS: position, number, pending. ARGV: generation, the table's name, then what `CHANGING` takes.
# 0 when the rows are another generation's.
FORGET = (
    """
if (redis.call('HGET', KEYS[1], 'generation') or '') ~= ARGV[1] then return 0 end
local fixed = 3
"""
    + CHANGING
    + """
for i = rows, #ARGV, 4 do change(i) end
finish(ARGV[2])
return 1
"""
)

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
local marks, number = {}, redis.call('INCR', KEYS[2])
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
    local id, due = ARGV[i + 3], ARGV[2 * count + 3 + i]
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
local marks, number = {}, redis.call('INCR', KEYS[4])
for i = 1, #ids do marks[2 * i - 1], marks[2 * i] = number, ids[i] end
redis.call('ZADD', KEYS[3], unpack(marks))
redis.call('ZREM', KEYS[2], unpack(ids))
return #ids
"""
