"""The pipeline file: what is accepted, and how every mistake in it is named."""

from pathlib import Path

import pytest

from cdc import settings
from cdc.errors import SettingsError

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


def test_the_sample_is_accepted() -> None:
    names = ("POSTGRES", "KAFKA", "CONNECT", "ELASTICSEARCH", "REDIS", "WAREHOUSE")
    pipeline = settings.load(Path(__file__).parents[2] / "sample/airport.yaml", {f"CDC_{name}": "x" for name in names})
    assert len(pipeline.source.tables) == 5
    assert set(pipeline.sinks) == {"search", "cache", "warehouse"}


@pytest.mark.parametrize(
    ("old", "new", "line", "message", "hint"),
    [
        ("pipeline: shop", "pipeline: Shop!", 1, "pipeline", ""),
        ("  dsn: ${DSN}", "  dsn: ${NOWHERE}", 5, "${NOWHERE}, which is not set", "export NOWHERE"),
        ("  dsn: ${DSN}", "  dsn: ${DSN}\n  colour: red", 6, "source.colour: no such setting", "dsn"),
        ("public.orders", "orders", 6, "a table is written schema.table", "public.flights"),
        ("public.orders", "public.items", 6, "listed twice: public.items", ""),
        ("public.orders", "public.Items", 6, "would share one: public.Items, public.items", "rename the table"),
        (
            "public.orders",
            '"public.order items"',
            6,
            "letters, digits, _ and -: public.order items",
            "rename the table",
        ),
        ("public.orders", "public.straße", 6, "letters, digits, _ and -: public.straße", "rename the table"),
        ("public.orders", "public.a$b", 6, "letters, digits, _ and -: public.a$b", "take it out"),
        ("public.orders", "public.a.b", 6, "a table is written schema.table", "a name with a dot"),
        ("[public.orders,", "[a.b_c, a_b.c,", 6, "differ only in . and _ can't both be: a.b_c, a_b.c", "rename"),
        ("partitions: 2", "partitions: none", 6, "partitions", ""),
        ("type: delta", "type: parquet", 10, "no such sink type", "elasticsearch, redis, delta"),
        ("prefix: shop", "prefixx: shop", 9, "sinks.cache.prefix", ""),
        (", path: /tmp/warehouse", "", 10, "sinks.warehouse.path: required, but missing", ""),
        ("pipeline: shop\n", "pipeline: shop\nsinc: {}\n", 2, "sinc: no such setting", "sinks"),
        ("source:", "source: [", None, "", ""),
    ],
)
def test_a_mistake_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, line: int | None, message: str, hint: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, GOOD.replace(old, new, 1))
    assert message in caught.value.message
    assert hint in caught.value.hint
    if line:
        assert f"shop.yaml:{line}:" in caught.value.message
    assert caught.value.exit_code == 2


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="can't be read"):
        settings.load(tmp_path / "none.yaml", {})


def test_the_name_is_known_before_any_server_runs(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(GOOD)
    assert settings.name_of(tmp_path / "p.yaml") == "shop"
