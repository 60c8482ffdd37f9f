"""The pipeline file: what is accepted, and how every mistake in it is named."""

import copy
import json
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from psycopg import sql

from cdc.config import settings
from cdc.config.server_settings import KafkaSettings
from cdc.config.settings import read_tree
from cdc.control import registrations
from cdc.errors import SettingsError
from cdc.model.login import Address, Login
from cdc.model.table import Column, IndexOptions, Projection, Table
from cdc.observe.collection import tables_of_sink
from cdc.postgres import table_survey
from cdc.postgres.row_query import row_query
from cdc.sinks.delta.settings import Delta
from tests.support import pages
from tests.support.answering import ELSEWHERE

GOOD = """\
pipeline: shop
kafka: localhost:9092
connect: http://localhost:8083
source:
  dsn: ${DSN}
  tables: [public.orders, {table: public.items, partitions: 2, exclude: [note]}]
sinks:
  search: {type: elasticsearch, url: "http://localhost:9200"}
  cache: {type: redis, url: "redis://localhost", prefix: shop}
  warehouse: {type: delta, path: /tmp/warehouse}
"""


def load(tmp_path: Path, text: str, **environment: str) -> settings.Pipeline:
    path = tmp_path / "shop.yaml"
    path.write_text(text)
    return settings.load(path, {"DSN": "postgresql://localhost/shop", **environment})


def test_a_whole_file(tmp_path: Path) -> None:
    pipeline = load(tmp_path, GOOD)
    assert [(t.table, t.partitions, t.exclude) for t in pipeline.source.tables] == [
        ("public.orders", 4, ()),
        ("public.items", 2, ("note",)),
    ]
    assert pipeline.source.dsn == "postgresql://localhost/shop"
    assert pipeline.topic("public.orders") == "shop.public.orders"


DOCUMENTED = [
    pytest.param(body, id=f"{page.stem}-{number}")
    for page in pages.PAGES
    for number, (language, body) in enumerate(pages.blocks(page.read_text()))
    if language == "yaml"
]
"""What pages show of pipeline files."""
FILES = re.compile(r"(/etc|/run|\$\{CDC_SECRETS\})/[\w./-]+")
"""Files that they name, with secrets and certificates."""


def put_in_file(part: dict[str, Any]) -> dict[str, Any]:
    """Return a whole file with a part of one, which pages show without what is around it."""
    tree = yaml.safe_load(GOOD)
    tree["source"]["tables"] = part.pop("tables", ["public.*"])
    places = {name: tree["sinks"] if name in tree["sinks"] else tree for name in part}
    for name, value in part.items():
        places[name][name] = value
    return tree  # type: ignore[no-any-return]


@pytest.mark.parametrize("block", DOCUMENTED)
def test_what_pages_show_of_a_file_is_accepted(tmp_path: Path, block: str) -> None:
    shown = tmp_path / "shown.yaml"
    shown.write_text(FILES.sub(str(ELSEWHERE), block))
    _, part = read_tree(shown)
    names = set(re.findall(r"\$\{(\w+)\}", block))
    environment = {name: f"https://example.com/{name}" for name in names}
    environment["SHOP_POSTGRES"] = "postgresql://localhost/shop"
    pipeline = load(tmp_path, yaml.safe_dump(put_in_file(part)), **environment)
    assert pipeline.pipeline == "shop"


@pytest.mark.parametrize(
    ("old_text", "new_text", "line", "message", "hint"),
    [
        ("pipeline: shop", "pipeline: Shop!", 1, "pipeline", ""),
        ("  dsn: ${DSN}", "  dsn: ${NOWHERE}", 5, "${NOWHERE}, which is not set", "export NOWHERE"),
        ("  dsn: ${DSN}", "  dsn: ${DSN}\n  colour: red", 6, "source.colour: no such setting", "dsn"),
        ("public.orders", "orders", 6, "a table is written schema.table", "public.flights"),
        ("public.orders", "public.items", 6, "listed twice: public.items", ""),
        ("public.orders", "public.Items", 6, "would share one: public.Items, public.items", "rename the table"),
        (
            "public.orders", '"public.order items"', 6, "letters, digits, _ and -: public.order items",
            "rename the table",
        ),
        ("public.orders", "public.straße", 6, "letters, digits, _ and -: public.straße", "rename the table"),
        ("public.orders", "public.a$b", 6, "letters, digits, _ and -: public.a$b", "take it out"),
        ("public.orders", "public.a.b", 6, "a table is written schema.table", "a name with a dot"),
        ("[public.orders,", "[a.b_c, a_b.c,", 6, "differ only in . and _ can't both be: a.b_c, a_b.c", "rename"),
        ("partitions: 2", "partitions: none", 6, "partitions", ""),
        ("type: delta", "type: parquet", 10, "no such sink type", "elasticsearch or redis or delta"),
        ("prefix: shop", "prefixx: shop", 9, "sinks.cache.prefix", ""),
        (", path: /tmp/warehouse", "", 10, "sinks.warehouse.path: required, but missing", ""),
        ("pipeline: shop\n", "pipeline: shop\nsinc: {}\n", 2, "sinc: no such setting", "sinks"),
        ("source:", "source: [", None, "", ""),
        ("  cache:", "  search:", 9, "sinks.search is there twice: the first is on line 8", "take one of them out"),
        ("source:", "pipeline: shop2\nsource:", 4, "pipeline is there twice: the first is on line 1", "take one"),
        ("public.orders", "*.*", 6, "a text that begins with * is taken for something else", 'quote it: "*.*"'),
        ("public.orders", "*orders", 6, "a text that begins with * is taken for something else", 'quote it: "*.*"'),
        ("source:", "sorce:", 4, "sorce: no such setting", "did you mean source? accepted here: changes_ret"),
        ("tables:", "tabels:", 6, "source.tabels: no such setting", "did you mean tables?"),
        ("partitions: 2", "partition: 2", 6, "tables.1.partition: no such setting", "did you mean partitions?"),
        ('url: "http', 'urll: "http', 8, "sinks.search.urll: no such setting", "did you mean url? accepted here: "),
        ("path: /tmp/warehouse", "prefix: shop", 10, "prefix: no such setting", "accepted here: path, tables, trigger"),
        ("prefix: shop", "spare: -1, prefix: shop", 9, "sinks.cache.spare: must be 0 or more", ""),
        ("type: delta, ", "", 10, "sinks.warehouse: its type is missing", "type: elasticsearch or redis or delta"),
        ("search:", "Search:", 8, "sinks.Search: a sink's name begins with", "for example: search"),
        ("prefix: shop", "prefix: 'a:b'", 9, "sinks.cache.prefix: takes a word without", "prefix: shop"),
        ("[public.orders, {table: public.items, partitions: 2, exclude: [note]}]", "[]", 6, "at least one", ""),
        ("[public.orders, {table: public.items, partitions: 2, exclude: [note]}]", "public.orders", 6, "a list is", ""),
        ("exclude: [note]", "mask: {note: hash}", 6, "tables.1.mask.note: no such mask", "redact, {hash: SALT}, {cut"),
        ("exclude: [note]", "mask: {note: {cut: 0}}", 6, "tables.1.mask.note: no such mask", ""),
        ("exclude: [note]", "mask: {note: {cut: 2, hash: s}}", 6, "tables.1.mask.note: no such mask", ""),
        ("exclude: [note]", "mask: {note: {hash: 'secret.1'}}", 6, "salt of a hash has letters, digits, _ and -", ""),
        (
            "exclude: [note]", "mask: {note: {hash: '${file:README.md}'}}", 6, "can't be a reference to a file",
            "{hash: shop-2026}; for values that nobody may find out: redact, or exclude",
        ),
        ("exclude: [note]", "exclude: [note], mask: {note: redact}", 6, "note is excluded, so", "take note out"),
        ("exclude: [note]", "key: [note], mask: {note: redact}", 6, "note is part of the key", "another key"),
        ("exclude: [note]", "exclude: note", 6, "source.tables.1.exclude: a list is needed: [a, b]", ""),
        ("  dsn: ${DSN}", "  dsn:", 5, "source.dsn: is empty", "for example: dsn: postgresql://owner"),
        ("http://localhost:9200", "localhost:9200", 8, "sinks.search.url: needs http:// or https://", "http://local"),
        ("http://localhost:8083", "localhost:8083", 3, "connect.url: needs http:// or https://", "http://localhost:9"),
        (
            "redis://localhost", "localhost:6379", 9, "sinks.cache.url: needs redis://, rediss:// or unix://",
            "redis://l",
        ),
        ("http://localhost:9200", "http://localhost:port", 8, "sinks.search.url: names no host and port", "%XX"),
        ("http://localhost:9200", "http://me:a/b@localhost:9200", 8, "search.url: names no host and port", "%XX"),
        ("redis://localhost", "redis://:6379", 9, "sinks.cache.url: names no host and port", "%XX"),
        ("redis://localhost", "http://localhost", 9, "sinks.cache.url: is no cache's", "rediss:// (TLS)"),
        (
            "/tmp/warehouse", "hdfs://lake/x", 10,
            "sinks.warehouse.path: is a folder's path or the URL of a bucket, and hdfs: isn't",
            "s3://, gs://, abfss://",
        ),
        (
            "/tmp/warehouse", "s3://key:secret@lake/x", 10, "sinks.warehouse.path: isn't the URL of a bucket",
            "credentials come from the environment",
        ),
        (
            "/tmp/warehouse", "s3://lake/../x", 10, "sinks.warehouse.path: isn't the URL of a bucket",
            "path: s3://bucket/warehouse",
        ),
        (
            "/tmp/warehouse", "gs:///x", 10, "sinks.warehouse.path: isn't the URL of a bucket",
            "path: gs://bucket/warehouse",
        ),
        ("  dsn: ${DSN}", "  dsn: ${NO-WHERE}", 5, "source.dsn has ${NO..., which is no reference", "${NAME:-default}"),
        (
            "  dsn: ${DSN}", "  dsn: ${file:${NO-WHERE}/x}", 5, "source.dsn has ${file..., which is no reference",
            "${file:/path}",
        ),
        ("  dsn: ${DSN}", "  dsn: ${NO:-${DSN}}", 5, "has ${NO..., which is no reference", "${NAME:-default}"),
        ("  dsn: ${DSN}", "  dsn: ${file:${SECRETS}/x}", 5, "refers to ${SECRETS}, which is not set", "export SECRETS"),
        ("  dsn: ${DSN}", "  dsn: ${CDC_READER}", 5, "refers to ${CDC_READER}, which is not set", "up --secured"),
        ("  dsn: ${DSN}", "  dsn: ${NO", 5, "source.dsn has ${NO..., which is no reference", "${NAME:-default}"),
        ("path: /tmp", "without_deletion_vectors: [public.item], path: /tmp", 7, "source.tables: public.item", ""),
        ("path: /tmp", "without_deletion_vectors: true, path: /tmp", 10, "without_deletion_vectors: a list is", ""),
        ("kafka:", "proof: {percent: 101}\nkafka:", 2, "proof.percent", ""),
        ("kafka:", "proof: {share: 3}\nkafka:", 2, "proof.share", "accepted here: percent"),
        ("kafka:", "proof: {percent: 0}\nkafka:", 2, "proof.percent", ""),
        ("kafka:", "proof: {sweep_hours: 0}\nkafka:", 2, "proof.sweep_hours", ""),
        ("kafka:", "proof: on\nkafka:", 2, "proof", ""),
        ("kafka:", "notify: [{url: a.b/secret}]\nkafka:", 2, "notify.0.url: needs http:// or https://", ""),
        ("kafka:", "notify: [{url: 'https://a', severity: info}]\nkafka:", 2, "notify.0.severity", ""),
        ("kafka:", "notify: [{url: 'https://a', after_s: -1}]\nkafka:", 2, "notify.0.after_s", ""),
        ("kafka:", "notify: [{url: 'https://a', format: slack}]\nkafka:", 2, "notify.0.format", ""),
        (
            '{type: elasticsearch, url: "http://localhost:9200"}', "{type: elasticsearch, url: ${CDC_ELASTICSEARCH}}",
            8, "${CDC_ELASTICSEARCH} inside of { } is taken apart", 'quote it: "${CDC_ELASTICSEARCH}"',
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line(
    tmp_path: Path, old_text: str, new_text: str, line: int | None, message: str, hint: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, GOOD.replace(old_text, new_text, 1))
    assert message in caught.value.message
    assert hint in caught.value.hint
    if line:
        assert f"shop.yaml:{line}:" in caught.value.message
    assert caught.value.exit_code == 2
    assert "secret" not in f"{caught.value.message} {caught.value.hint}"


def test_the_proof_is_on_unless_the_file_turns_it_off(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD).proof == settings.ProofSettings()
    assert load(tmp_path, GOOD + "proof: off\n").proof.percent == 0


@pytest.mark.parametrize("mark", ["\n", "\r", "\t", " ", "\x00", "\x7f"])
@pytest.mark.parametrize("address", ["https://a.example/{}", "https://a{}.example/"])
def test_an_address_with_a_mark_that_no_address_has_is_refused(
    tmp_path: Path, address: str, mark: str
) -> None:
    """As the last line of a mounted secret leaves one. The address may be the secret itself."""
    text = GOOD + 'notify: [{url: "${SHOP_WEBHOOK}"}]\n'
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, text, SHOP_WEBHOOK=address.format(f"secret{mark}"))
    assert "notify.0.url: has white space" in caught.value.message
    assert "secret" not in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize(
    ("name", "up"),
    [
        ("SHOP_POSTGRES", False),
        ("CDC_POSTGRES", True),
        ("CDC_SHOP", False),
        ("CDC_POSTGRESS", False),
    ],
)
def test_the_stack_is_named_for_what_it_sets_alone(tmp_path: Path, name: str, up: bool) -> None:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, GOOD.replace("DSN", name))
    assert f"export {name}=..." in caught.value.hint
    assert ("shop.yaml up" in caught.value.hint) is up
    assert ("did you mean ${CDC_POSTGRES}" in caught.value.hint) is (name == "CDC_POSTGRESS")


@pytest.mark.parametrize(
    ("environment", "dsn"),
    [({}, "postgresql://a/b"), ({"OWN": ""}, "postgresql://a/b"), ({"OWN": "x"}, "x")],
)
def test_a_reference_may_have_a_default(
    tmp_path: Path, environment: dict[str, str], dsn: str
) -> None:
    text = GOOD.replace("${DSN}", "${OWN:-postgresql://a/b}")
    assert load(tmp_path, text, **environment).source.dsn == dsn


@pytest.mark.parametrize("folder", ["warehouse", "./warehouse", "${HERE}/warehouse"])
def test_a_relative_path_is_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    path = tmp_path / "files" / "shop.yaml"
    path.parent.mkdir()
    path.write_text(GOOD.replace("/tmp/warehouse", f'"{folder}"'))
    monkeypatch.chdir(tmp_path)
    for name in (path, Path("files/shop.yaml")):
        loaded = settings.load(name, {"DSN": "", "HERE": "."})
        assert loaded.sinks["warehouse"].path == str(path.parent / "warehouse")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("search", "problem"),
    [
        ("", "search: needs a url or nodes, and takes one of them"),
        (
            'url: "http://a", nodes: ["http://b"]',
            "search: needs a url or nodes, and takes one of them",
        ),
        ('nodes: ["https://a:9200", "https://A:9200/"]', "search.nodes: names a node twice"),
        ('nodes: ["https://me:hunter2@a"]', "search.nodes: has a login in a node"),
        ('nodes: ["https://a", "http://b"]', "search.nodes: mixes http:// and https://"),
        ('nodes: ["a:9200"]', "search.nodes.0: needs http:// or https://"),
        ('url: "http://a", ca: PEM', "search: ca and certificate have no effect with http:"),
        ('url: "https://a", ca: nowhere.pem', "search.ca: is not an existing file"),
        ('url: "https://a", ca: shop.yaml', "search.ca: holds no certificates in PEM"),
        ('url: "https://a", certificate: PEM', "search: certificate and key go together"),
        ('url: "https://a", user: me', "search: user and password go together"),
        ('url: "https://me:hunter2@a", user: me, password: hunter2', "search: has two logins"),
        (
            'url: "https://a", api_key: hunter2, user: me, password: hunter2',
            "search: has two logins",
        ),
    ],
)
def test_an_index_that_cannot_be_reached_so_is_refused(
    tmp_path: Path, search: str, problem: str
) -> None:
    settings_text = f"{{type: elasticsearch, {search.replace('PEM', str(ELSEWHERE))}}}"
    with pytest.raises(SettingsError) as caught:
        load(
            tmp_path,
            GOOD.replace('{type: elasticsearch, url: "http://localhost:9200"}', settings_text),
        )
    assert f": sinks.{problem}" in caught.value.message
    assert "hunter2" not in f"{caught.value} {caught.value.hint}"


def test_an_index_has_several_nodes_and_a_login(tmp_path: Path) -> None:
    search = 'nodes: ["https://a:9200/", "https://b:9200"], ca: PEM, user: me, password: hunter2'
    settings_text = f"{{type: elasticsearch, {search.replace('PEM', str(ELSEWHERE))}}}"
    loaded = load(
        tmp_path, GOOD.replace('{type: elasticsearch, url: "http://localhost:9200"}', settings_text)
    )
    address = loaded.sinks["search"].address  # type: ignore[attr-defined]
    assert address == Address(
        "https://a:9200,https://b:9200", Login(ca=str(ELSEWHERE), user="me", password="hunter2")
    )
    assert "hunter2" not in repr(loaded)


@pytest.mark.parametrize(
    ("sink", "same"),
    [
        ('{type: elasticsearch, url: "http://localhost:9200"}', "search"),
        ('{type: elasticsearch, url: "http://me:secret@127.0.0.1:9200/"}', "search"),
        (
            '{type: elasticsearch, nodes: ["http://localhost:9202", "http://127.0.0.1:9200"]}',
            "search",
        ),
        ('{type: elasticsearch, nodes: ["http://localhost:9201", "http://localhost:9202"]}', None),
        ('{type: elasticsearch, url: "http://localhost:9201"}', None),
        ('{type: elasticsearch, url: "http://localhost:9200/behind/a/proxy"}', None),
        ('{type: redis, url: "redis://localhost/0", prefix: shop}', "cache"),
        ('{type: redis, url: "redis://app:secret@localhost:6379?db=0", prefix: shop}', "cache"),
        ('{type: redis, url: "redis://localhost", prefix: shop2}', None),
        ('{type: redis, url: "redis://localhost/2", prefix: shop}', None),
        ('{type: redis, url: "redis://127.0.0.1:6380", prefix: shop}', None),
        ("{type: delta, path: /tmp/../tmp/warehouse/}", "warehouse"),
        ("{type: delta, path: /tmp/warehouse2}", None),
    ],
)
def test_two_sinks_on_one_place_are_refused(tmp_path: Path, sink: str, same: str | None) -> None:
    text = f"{GOOD}  another: {sink}\n"
    if same is None:
        assert "another" in load(tmp_path, text).sinks
        return
    with pytest.raises(SettingsError, match=f"sinks: {same} and another are on one") as caught:
        load(tmp_path, text)
    assert "secret" not in caught.value.message
    assert "give another another " in caught.value.hint


LISTED = GOOD.replace("{type: redis, ", "{type: redis, tables: LISTED, ")


@pytest.mark.parametrize(
    ("listed", "in_cache"),
    [
        ("[public.orders]", ["public.orders"]),
        ('["public.*"]', ["public.orders", "public.items"]),
        ("['public.i*', {table: public.orders}]", ["public.orders", "public.items"]),
    ],
)
def test_a_sink_has_the_tables_that_it_lists(
    tmp_path: Path, listed: str, in_cache: list[str]
) -> None:
    pipeline = load(tmp_path, LISTED.replace("LISTED", listed))
    tables = table_survey.tables_by_name_only(pipeline)
    of_sink = {
        sink: [table.qualified for table in tables if table.is_in(sink)] for sink in pipeline.sinks
    }
    everything = ["public.orders", "public.items"]
    assert of_sink == {"search": everything, "cache": in_cache, "warehouse": everything}


@pytest.mark.parametrize(
    ("listed", "key", "problem", "hint"),
    [
        ("[public.orderz]", "tables.0", "the table isn't captured", "did you mean public.orders?"),
        ("[a.b]", "tables.0", "the table isn't captured", "source.tables, or list one of: public.orders, public.items"),
        ("[public.orders, 'sales.*']", "tables.1", "the pattern matches nothing of source.tables", "public.orders"),
        ("['public.a?*']", "tables.0.table", "a pattern has letters, digits, _, - and * only", "public.*"),
        (
            "[{table: 'public.*', exclude: [note]}]", "tables.0", "exclude is a single table's, not a pattern's",
            "list that table as well: [public.*, {table: schema.table, exclude: ...}]",
        ),
        (
            "[{table: public.items, columns: [a], exclude: [note]}]", "tables.0",
            "columns and exclude say the same in two ways", "only one of them",
        ),
        ("[{table: public.items, colums: [a]}]", "tables.0.colums", "no such setting", "did you mean columns?"),
        (
            "[{table: 'public.*', where: n > 0, rename: {a: b}}]", "tables.0",
            "rename and where are a single table's, not a pattern's", "{table: schema.table, rename: ...}",
        ),
        (
            "[{table: public.items, rename: {a: _CDC_a}}]", "tables.0.rename.a",
            "a name isn't empty and doesn't begin with _cdc", "for example: {a: total}",
        ),
        ("[{table: public.items, rename: {a: ''}}]", "tables.0.rename.a", "a name isn't empty", "total"),
        ("[orders]", "tables.0.table", "a table is written schema.table", "public.flights"),
        ("[public.items, public.items]", "tables", "listed twice: public.items", "take one"),
        ("public.items", "tables", "a list is needed: [a, b]", "tables: [public.orders]"),
        ("[]", "tables", "the sink gets nothing: no table, and no view has it in its `to`", "take the sink out"),
    ],
)  # fmt: skip
def test_what_a_sink_cannot_list(
    tmp_path: Path, listed: str, key: str, problem: str, hint: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, LISTED.replace("LISTED", listed))
    assert f"shop.yaml:9: sinks.cache.{key}: {problem}" in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("entry", "kept"),
    [
        ("{table: public.items, exclude: [note, secret]}", ["n"]),
        ("{table: public.items, exclude: [secret, note]}", ["n"]),
        ("{table: public.items, columns: [note]}", ["note"]),
        ("{table: public.items, columns: [note, id]}", ["note"]),
        ("{table: public.items, columns: []}", []),
        ("public.items", ["n", "note", "secret"]),
        ("'public.*'", ["n", "note", "secret"]),
    ],
)
def test_a_sink_has_the_columns_that_it_lists(tmp_path: Path, entry: str, kept: list[str]) -> None:
    """And always the key. What is stored beside the view's position follows the list, not its order."""
    pipeline = load(
        tmp_path,
        LISTED.replace("LISTED", f"['public.*', {entry}]" if "table" in entry else f"[{entry}]"),
    )
    columns = tuple(Column(name, "text") for name in ("id", "n", "note", "secret"))
    index = IndexOptions({"n": {"type": "keyword"}, "note": {"type": "keyword"}})
    table = Table(
        "public", "items", columns, ("id",), "shop.public.items",
        index=index, projections=pipeline.projections("public.items"),
    )  # fmt: skip
    assert [table.for_sink(sink) for sink in ("search", "warehouse")] == [table, table]
    in_cache = table.for_sink("cache")
    assert [column.name for column in in_cache.columns] == ["id", *kept]
    assert in_cache.index.fields.keys() == {"n", "note"} & {*kept}
    assert in_cache.reshaped is bool(in_cache.shape) is (len(kept) < 3)
    assert in_cache.for_sink("cache") == in_cache
    exclude = Projection(exclude=("note", "secret"))
    assert (in_cache.shape == exclude.shape(("id",))) is (kept == ["n"])


ITEMS = Table(
    "public",
    "items",
    (Column("id", "integer"), Column("n", "integer"), Column("note", "text"), Column("mood", "public.mood")),
    ("id",),
    "shop.public.items",
    labels={"mood": ("sad", "ok")},
)  # fmt: skip


def for_cache(tmp_path: Path, entry: str) -> Table:
    text = LISTED.replace("LISTED", f"[{{table: public.items, {entry}}}]")
    return table_survey.for_sinks(ITEMS, load(tmp_path, text))


@pytest.mark.parametrize(
    ("entry", "problem", "hint"),
    [
        ("rename: {nn: total}", "names nn, but has no such column.", "did you mean n?"),
        ("rename: {note: total}, exclude: [note]", "renames note, which the sink doesn't have.", "take note out of"),
        ("rename: {note: N}", "has two columns of one name after rename: n and N.", "differs in more than case"),
        ("rename: {note: n}", "has two columns of one name after rename: n and n.", "rename one of them"),
        ("rename: {note: x, n: x}", "has two columns of one name after rename: x and x.", "rename one of them"),
        ("where: n", "where: isn't a condition.", "status <> 'draft'"),
        ("where: m > 0", "where: the table has no column m.", "its columns: id, n, note, mood"),
        ("where: n >", "where: is no SQL expression.", "accepted: columns"),
        ("where: now() > 'x'", "where: now() here: only a view's where and having may", "having"),
        ("where: \"mood = 'sadd'\"", "where: public.items.mood has no label 'sadd'.", "did you mean 'sad'?"),
    ],
)  # fmt: skip
def test_what_an_entry_of_a_sink_cannot_mean(
    tmp_path: Path, entry: str, problem: str, hint: str
) -> None:
    message, advice = for_cache(tmp_path, entry).misnamed["cache"]
    assert message.startswith("In sinks.cache, public.items")
    assert problem in message
    assert hint in advice


def test_names_and_rows_are_part_of_what_a_view_is_known_by(tmp_path: Path) -> None:
    """And older views are known by what they have stored."""
    entries = [
        "exclude: [note]",
        "exclude: [note], rename: {n: n}",
        "exclude: [note], rename: {n: m}",
        "exclude: [note], where: n > 0",
        "exclude: [note], where: n > 0, rename: {n: m}",
        "where: n > 0",
    ]
    tables = [for_cache(tmp_path, entry).for_sink("cache") for entry in entries]
    shapes = [table.shape for table in tables]
    assert shapes[0] == shapes[1] == "b37af2c02562"
    assert len({*shapes}) == len(entries) - 1
    swapped = for_cache(tmp_path, "columns: [n], rename: {id: n, n: id}").for_sink("cache")
    assert [(column.name, column.source_name) for column in swapped.columns] == [
        ("n", "id"),
        ("id", "n"),
    ]
    assert swapped.column("id").name == "n"
    query = row_query(replace(swapped, where=tables[3].where), sql.SQL("true")).as_string(None)
    assert "to_json('n'::text)::text || ':' || coalesce(to_json((to_json(\"id\")" in query
    assert query.endswith('FROM "public"."items" WHERE (("n" > (0))) AND (true)')


def test_a_table_is_compared_once_for_the_sinks_with_the_same_columns() -> None:
    columns = tuple(Column(name, "text") for name in ("id", "n", "note"))
    few = Projection(("n",))
    projections = {"cache": few, "search": few}
    table = Table(
        "public", "items", columns, ("id",), "shop.public.items",
        unlisted_by=("paper",), projections=projections,
    )  # fmt: skip
    sinks = ["search", "warehouse", "cache", "paper"]
    selected = table_survey.tables_in(sinks, [table])
    assert [[column.name for column in part.columns] for part in selected] == [
        ["id", "n"],
        ["id", "n", "note"],
    ]
    assert [list(filter(part.is_in, sinks)) for part in selected] == [
        ["search", "cache"],
        ["warehouse"],
    ]
    assert table_survey.tables_in(sinks, selected) == selected
    assert table_survey.tables_in(["paper"], [table]) == ()


def test_the_state_lists_no_tables(tmp_path: Path) -> None:
    """It needs all that views are made of, whatever sinks list."""
    state = (
        "state: {type: redis, url: redis://localhost/4, prefix: shop, tables: [public.orders]}\n"
    )
    with pytest.raises(SettingsError, match=r":11: state.tables: the state has the tables"):
        load(tmp_path, GOOD + state)


def test_a_sink_may_have_documents_alone(tmp_path: Path) -> None:
    items = "{table: public.items, on: {order_id: id}}"
    views = f"views: {{full: {{root: public.orders, to: [cache], include: {{items: {items}}}}}}}"
    state = "state: {type: redis, url: redis://localhost/4, prefix: shop}"
    pipeline = load(tmp_path, f"{LISTED.replace('LISTED', '[]')}{state}\n{views}\n")
    names = [table.qualified for table in tables_of_sink(pipeline, "cache", ())]
    assert names == ["view.full"]
    made_of = [table.qualified for table in tables_of_sink(pipeline, "state", ())]
    assert made_of == ["public.orders", "public.items"]


def test_patterns_of_the_source_leave_open_what_a_sink_may_list(tmp_path: Path) -> None:
    """Until it is known which tables they match."""
    text = LISTED.replace("[public.orders, {", "['sales.*', {").replace("LISTED", "[sales.orderz]")
    pipeline = load(tmp_path, text)
    pipeline.with_tables(["sales.orderz"]).refuse_unknown_tables()
    registrations.refuse_meaningless(["sales.orderz", "public.items"], pipeline)
    with pytest.raises(SettingsError, match=r":9: sinks.cache.tables.0: the table isn't") as caught:
        pipeline.with_tables(["sales.orders"]).refuse_unknown_tables()
    assert caught.value.hint == "did you mean sales.orders?"


REGISTER = "if it is new: cdc -p FILE migrate, then cdc -p FILE register; if not, "


@pytest.mark.parametrize(
    ("listed", "hint"),
    [
        ("[sales.orderz]", REGISTER + "did you mean sales.orders?"),
        ("[sales.xyz]", REGISTER + "list one of: sales.orders, public.items"),
        ("['sales.xyz*']", REGISTER + "list one of: sales.orders, public.items"),
        ("[{table: sales.xyz, exclude: [note]}]", REGISTER + "list one of: sales.orders, public.items"),
    ],
)  # fmt: skip
def test_a_table_that_is_not_registered_yet_may_be_new(
    tmp_path: Path, listed: str, hint: str
) -> None:
    """A pattern of the source matches it: there is nothing to add to source.tables."""
    text = LISTED.replace("[public.orders, {", "['sales.*', {").replace("LISTED", listed)
    pipeline = load(tmp_path, text)
    with pytest.raises(SettingsError, match=r":9: sinks.cache.tables.0: the ") as caught:
        registrations.refuse_meaningless(["sales.orders", "public.items"], pipeline)
    assert caught.value.hint == hint


WRONG: Any = (None, [], {}, "", " ", "x!", -1, 0.5, True, ["x"], {"x": "y"}, {"type": "delta"})


def mistaken(node: Any) -> Iterator[Any]:
    """Copies of a tree with one wrong value each, in every place."""
    for name in list(node if isinstance(node, dict) else range(len(node))):
        for wrong in WRONG:
            value = node[name]
            node[name] = wrong
            yield copy.deepcopy(node)
            node[name] = value
        if isinstance(node[name], dict | list):
            inner = node[name]
            for node[name] in mistaken(inner):
                yield copy.deepcopy(node)
            node[name] = inner


@pytest.mark.parametrize("table", ["public.items", "public.*", "*"])
def test_tables_without_deletion_vectors_are_of_the_file(tmp_path: Path, table: str) -> None:
    text = GOOD.replace("path: /tmp", f"without_deletion_vectors: ['{table}'], path: /tmp")
    sink = load(tmp_path, text).sinks["warehouse"]
    assert isinstance(sink, Delta)
    assert sink.without_deletion_vectors == (table,)


def test_no_mistake_is_reported_in_words_of_the_library(tmp_path: Path) -> None:
    refused = []
    for tree in mistaken(yaml.safe_load(GOOD)):
        try:
            load(tmp_path, json.dumps(tree))
        except SettingsError as error:
            refused.append(f"{error.message} {error.hint}")
    assert len(refused) > 150
    strange = r"Input should|valid|tuple|dictionary|instance|None|isn't accepted|union|tag|loc|str_"
    assert [words for words in refused if re.search(strange, words.replace("localhost", ""))] == []


def test_the_name_is_known_before_any_server_runs(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(GOOD)
    assert settings.name_of(tmp_path / "p.yaml") == "shop"


@pytest.mark.parametrize(
    ("section", "message", "hint"),
    [
        ("kafka: {protocol: SSL}", "kafka.brokers: required, but missing", "kafka-1:9093"),
        ("kafka: {brokers: b, protocol: TLS}", "kafka.protocol: must be 'PLAINTEXT', 'SSL'", ""),
        ("kafka: {brokers: b, protocol: SASL_SSL}", "kafka: protocol SASL_SSL needs a mechanism", "SCRAM-SHA-512"),
        ("kafka: {brokers: b, mechanism: PLAIN}", "kafka: protocol PLAINTEXT has no mechanism", "SASL_SSL"),
        ("kafka: {brokers: b, protocol: SASL_SSL, mechanism: PLAIN, user: u}", "mechanism PLAIN needs password", "add"),
        ("kafka: {brokers: b, user: u}", "kafka: user has no effect without a mechanism", "take user out"),
        ("kafka: {brokers: b, ca: FOLDER/ca}", "ca and certificate have no effect with protocol PLAINTEXT", "SASL_SSL"),
        ("kafka: {brokers: b, protocol: SSL, ca: FOLDER/none}", "kafka.ca: is not an existing file", "PEM"),
        ("kafka: {brokers: b, protocol: SSL, ca: FOLDER/text}", "kafka.ca: holds no certificates", "openssl x509"),
        ("kafka: {brokers: b, protocol: SSL, certificate: FOLDER/ca}", "certificate and key go together", "neither"),
        (
            "kafka: {brokers: b, protocol: SSL, certificate: FOLDER/ca, key: FOLDER/text}",
            "kafka.certificate: can't be read, doesn't match key", "openssl pkey",
        ),
        (
            "kafka: {brokers: b, replication_factor: 2, min_insync_replicas: 2}",
            "kafka.min_insync_replicas: has to be less than replication_factor", "min_insync_replicas: 1",
        ),
        ("connect: {url: 'http://c', user: u}", "connect: user and password go together", "neither"),
        ("connect: {url: 'http://c', user: u, password: p, token: t}", "user and token exclude each other", "take one"),
        ("connect: {url: 'http://c', ca: FOLDER/ca}", "connect.url: ca and certificate have no effect", "https:"),
        ("connect: {password: p}", "connect.url: required, but missing", "https://connect"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_login_is_named(
    tmp_path: Path, section: str, message: str, hint: str
) -> None:
    (tmp_path / "ca").write_text(ELSEWHERE.read_text())
    (tmp_path / "text").write_text("no certificate")
    name = section.partition(":")[0]
    lines = [line for line in GOOD.splitlines() if not line.startswith(f"{name}:")]
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, "\n".join([*lines, section.replace("FOLDER", str(tmp_path)), ""]))
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_server_with_another_login_is_another_server() -> None:
    """What is kept by address, such as connections, isn't used for another login."""
    settings = {"brokers": "b:1", "protocol": "SASL_SSL", "mechanism": "PLAIN", "user": "u"}
    one = KafkaSettings.model_validate({**settings, "password": "a"}).address
    other = KafkaSettings.model_validate({**settings, "password": "b"}).address
    assert one != other
    assert one == pickle.loads(pickle.dumps(one))
    assert len({one, other, "b:1"}) == 3
    assert (Address("b:1"), str(one)) == ("b:1", "b:1")
    assert "password" not in repr(one.login)
