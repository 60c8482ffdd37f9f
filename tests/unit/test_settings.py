"""The pipeline file: what is accepted, and how every mistake in it is named."""

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdc.config import settings
from cdc.config.settings import read_tree
from cdc.errors import SettingsError
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
SECRETS = "/run/secrets/|/etc/cdc/"
"""Folders of files that pages name, and a machine need not have."""


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
    for name in re.findall(rf"(?:{SECRETS})([\w.-]+)", block):
        shutil.copy(ELSEWHERE, tmp_path / name)
    shown = tmp_path / "shown.yaml"
    shown.write_text(re.sub(SECRETS, f"{tmp_path}/", block))
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
        ("path: /tmp/warehouse", "prefix: shop", 10, "prefix: no such setting", "accepted here: path, trigger_s, type"),
        ("prefix: shop", "spare: -1, prefix: shop", 9, "sinks.cache.spare: must be 0 or more", ""),
        ("type: delta, ", "", 10, "sinks.warehouse: its type is missing", "type: elasticsearch or redis or delta"),
        ("search:", "Search:", 8, "sinks.Search: a sink's name begins with", "for example: search"),
        ("prefix: shop", "prefix: 'a:b'", 9, "sinks.cache.prefix: takes a word without", "prefix: shop"),
        ("[public.orders, {table: public.items, partitions: 2, exclude: [note]}]", "[]", 6, "at least one", ""),
        ("[public.orders, {table: public.items, partitions: 2, exclude: [note]}]", "public.orders", 6, "a list is", ""),
        ("exclude: [note]", "exclude: note", 6, "source.tables.1.exclude: a list is needed: [a, b]", ""),
        ("  dsn: ${DSN}", "  dsn:", 5, "source.dsn: is empty", "for example: dsn: postgresql://owner"),
        ("http://localhost:9200", "localhost:9200", 8, "sinks.search.url: needs http:// or https://", "http://local"),
        ("http://localhost:8083", "localhost:8083", 3, "connect: needs http:// or https://", "http://localhost:9"),
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
        ("  dsn: ${DSN}", "  dsn: ${NO", 5, "source.dsn has ${NO..., which is no reference", "${NAME:-default}"),
        ("path: /tmp", "without_deletion_vectors: [public.item], path: /tmp", 7, "source.tables: public.item", ""),
        ("path: /tmp", "without_deletion_vectors: true, path: /tmp", 10, "without_deletion_vectors: a list is", ""),
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
    ("sink", "same"),
    [
        ('{type: elasticsearch, url: "http://localhost:9200"}', "search"),
        ('{type: elasticsearch, url: "http://me:secret@127.0.0.1:9200/"}', "search"),
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
