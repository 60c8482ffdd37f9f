"""The state's writer on executors: one Lua call per part of a chunk.

Each script compares before it changes, and is one step for readers and crashes.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from cdc.documents.plan import StatePlan
from cdc.documents.rows import ConnectorRows, entry_maker, latest_times
from cdc.documents.scripts import SEE
from cdc.documents.state import State, index_prefix, state_failure, state_key
from cdc.model.table import Table
from cdc.redis.server import client, position_key, view_key
from cdc.sink.lane import ChunkLimits, Failure, FoldedRow, Part
from cdc.sinks.redis.executor import ChunkWriter, PendingAdvance
from cdc.sinks.redis.scripts import MOVING

CHUNK = ChunkLimits(rows=500, bytes=2_000_000)
"""Size of a Lua call: with five entries a row it takes some 12 ms."""

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
local number = nil
local pending = {}
local bytes = 0
local count = 0
local changed = {}
local clocks = {}
local refused = {}
local late = {}
-- What the rows' entries come to, by key: members of sets and of lists, and sums of tallies by field. Rows of
-- one chunk often share a pane or a parent, and a call costs more than what it does.
local added = {}
local removed = {}
local listed = {}
local unlisted = {}
local sums = {}
-- Ids and what is stored under them at the end, and ids of deleted rows.
local stored = {}
local deleted = {}
local seen = {}
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
  -- Ids that were scanned may come twice.
  if seen[id] then return end
  seen[id] = true
  local old = redis.call('GET', R .. id)
  local new
  if row == '' then entries = '' else new = entries .. RS .. key .. RS .. row end
  if old == (new or false) then return end
  if new then
    stored[#stored + 1] = id
    stored[#stored + 1] = new
  else
    deleted[#deleted + 1] = id
  end
  number = number or redis.call('INCR', KEYS[2])
  local before = ''
  if old then
    local a = string.find(old, RS, 1, true)
    before = string.sub(old, 1, a - 1)
    if not new then key = string.sub(old, a + 1, string.find(old, RS, a + 1, true) - 1) end
    bytes = bytes - #old
    count = count - 1
  end
  if new then
    bytes = bytes + #new
    count = count + 1
  end
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
local function sum(sign)
  for tally, fields in pairs(sums) do
    for field, amount in pairs(fields) do
      if amount ~= 0 and redis.call('HINCRBY', tally, field, string.format('%d', sign * amount)) == 0 then
        redis.call('HDEL', tally, field)
      end
    end
  end
end
-- Does at once what the rows have in common. If a command is refused in its middle, what was done stays, and
-- the chunk comes again: so the rows, by which it is known what is to be undone, come last. All but the sums may
-- be done twice.
local function finish(table)
  for key, ids in pairs(removed) do redis.call('SREM', key, unpack(ids)) end
  for key, ids in pairs(added) do redis.call('SADD', key, unpack(ids)) end
  for key, members in pairs(unlisted) do redis.call('ZREM', key, unpack(members)) end
  for key, members in pairs(listed) do redis.call('ZADD', key, unpack(members)) end
  if #changed > 0 then
    for v = 0, views - 1 do redis.call('ZADD', ARGV[roots + 2 * v], unpack(changed)) end
  end
  if #pending > 0 then redis.call('HSET', KEYS[3], number, cmsgpack.pack({table, pending})) end
  sum(1)
  for i = 1, #stored, 2 do
    local answer = redis.pcall('SET', R .. stored[i], stored[i + 1])
    if answer.err then
      if i == 1 then sum(-1) end
      return answer
    end
  end
  for _, id in ipairs(deleted) do redis.call('DEL', R .. id) end
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
local refused_row = finish(ARGV[first + 3])
if refused_row then return refused_row end
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
return finish(ARGV[2]) or 1
"""
)


@dataclass
class StateWriter(ChunkWriter):
    plan: StatePlan
    form = ConnectorRows()
    limits = CHUNK

    def read_stored(self, part: Part, rows: Sequence[FoldedRow]) -> Mapping[str, bytes]:
        stored = State(self.url, self.prefix).rows(
            part.advance.table.qualified, [row.id for row in rows]
        )
        return {row_id: row.row for row_id, row in stored.items()}

    def _call(
        self, part: Part, pending: PendingAdvance, rows: Sequence[FoldedRow], start: int, end: int
    ) -> Sequence[str]:
        table = part.advance.table
        entries = entry_maker(self.plan, table)
        current = [row.value for row in rows if row.value is not None]
        latest = latest_times(self.plan, table, current, time.time_ns() // 1000)
        values: list[str | bytes] = []
        for row in rows:
            head = "" if row.value is None else entries(row.value)
            values += [row.id, head, row.sources[-1].key or b"", row.value or b""]
        arguments = pending.arguments(
            part.partition,
            start,
            end,
            table.qualified,
            *changing(self.plan, self.prefix, table),
            *values,
        )
        keys = [
            position_key(self.prefix, table.qualified),
            state_key(self.prefix, "number"),
            state_key(self.prefix, "pending"),
            state_key(self.prefix, "unsent"),
            state_key(self.prefix, "late"),
        ]
        try:
            if latest:
                # Before the rows: of a crash between the two, the rows come again.
                seen = [part for pair in latest.items() for part in pair]
                keys_seen = [state_key(self.prefix, "seen")]
                client(self.url).register_script(SEE)(keys=keys_seen, args=seen)
            answer: Sequence[str] = client(self.url).register_script(APPLY)(
                keys=keys, args=arguments
            )
        except redis.exceptions.RedisError as error:
            raise Failure(*state_failure(error, self.url, f"rows of {table.qualified}")) from None
        return answer


def changing(plan: StatePlan, prefix: str, table: Table) -> list[Any]:
    """Build the scripts' arguments about a table, which precede its rows: see `CHANGING`."""
    roots = plan.roots(table.qualified)
    return [
        view_key(prefix, table.qualified),
        index_prefix(prefix, table.qualified),
        int(plan.leads_to_documents(table.qualified)),
        state_key(prefix, "clocks"),
        len(roots),
        *(state_key(prefix, name, view) for view in roots for name in ("dirty", "gone")),
    ]
