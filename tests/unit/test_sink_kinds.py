"""A kind of sink from a package that isn't ours: named in its entry point, read from a pipeline
file, built.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.config import settings, sink_kinds
from cdc.errors import SettingsError
from cdc.kafka.topic_setup import COMPACTION_LAG, topic_settings
from cdc.sink import factory

TOY = '''
from collections.abc import Hashable
from typing import Literal

from pydantic import Field

from cdc.config.mistakes import InvalidSetting
from cdc.config.sink_kinds import SinkSettings


class Paper(SinkSettings):
    keeps_changes = True
    location_setting = "drawer"
    type: Literal["paper"]
    """Which kind of sink it is."""
    drawer: int = Field(ge=1, examples=[3])
    """Where the sheets lie."""
    only: tuple[str, ...] = ()
    """Tables."""
    trigger_s: float = 60.0
    """Seconds."""

    @property
    def place(self) -> Hashable:
        return "paper", self.drawer

    def refuse_strangers(self, name, listed):
        if strange := [table for table in self.only if table not in listed]:
            raise InvalidSetting(f"{name}.only names {strange[0]}", "list it")

    def build(self, name, pipeline):
        return name, pipeline, self.drawer
'''
FILE = """\
pipeline: shop
kafka: localhost:9092
connect: http://localhost:8083
source: {dsn: "postgresql://localhost/shop", tables: [public.orders]}
sinks:
  cache: {type: redis, url: "redis://localhost", prefix: shop}
  archive: {type: paper, drawer: 2, only: [public.orders]}
"""


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with one kind of sink; gone afterwards."""
    (tmp_path / "papersink.py").write_text(TOY)
    metadata = tmp_path / "papersink-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: papersink\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[{sink_kinds.GROUP}]\npaper = papersink:Paper\n")
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield
    sys.modules.pop("papersink", None)
    forget()


def forget() -> None:
    sink_kinds.kinds.cache_clear()
    settings.file_model.cache_clear()


def load(tmp_path: Path, text: str) -> settings.Pipeline:
    path = tmp_path / "shop.yaml"
    path.write_text(text)
    return settings.load(path, {})


def test_it_is_accepted_and_built(tmp_path: Path) -> None:
    pipeline = load(tmp_path, FILE)
    assert type(pipeline) is settings.Pipeline
    assert {name: sink.trigger_s for name, sink in pipeline.sinks.items()} == {
        "cache": 0.2,
        "archive": 60.0,
    }
    assert factory.build(pipeline, "archive") == ("archive", "shop", 2)  # type: ignore[comparison-overlap]


def test_superseded_records_stay_where_a_sink_keeps_every_change(tmp_path: Path) -> None:
    text = FILE.replace("tables: [public.orders]", "tables: [public.orders, public.lines]")
    some = text.replace("drawer: 2", "drawer: 2, tables: [public.orders]")
    for written, expected in ((text, {"orders", "lines"}), (some, {"orders"})):
        pipeline = load(tmp_path, written)
        topics = [pipeline.topic(f"public.{name}") for name in ("orders", "lines")]
        kept = {
            topic.rpartition(".")[2]: found[COMPACTION_LAG]
            for topic, found in topic_settings(pipeline, topics).items()
            if COMPACTION_LAG in found
        }
        assert kept == dict.fromkeys(expected, str(24 * 3_600_000))


@pytest.mark.parametrize(
    ("old_text", "new_text", "message", "hint"),
    [
        ("drawer: 2", "drawer: 0", "shop.yaml:7: sinks.archive.drawer: must be 1 or more", "for example: drawer: 3"),
        ("drawer: 2", "drawers: 2", "shop.yaml:7: sinks.archive.drawers: no such setting", "did you mean drawer?"),
        ("type: paper", "type: stone", "shop.yaml:7: sinks.archive: no such sink type", "paper"),
        ("only: [public.orders]", "only: [public.items]", "shop.yaml:5: sinks: archive.only names public.items", ""),
        ("}\n  archive", "}\n  second: {type: paper, drawer: 2}\n  archive", "second and archive", "another drawer"),
    ],
)  # fmt: skip
def test_its_mistakes_are_named_as_ours_are(
    tmp_path: Path, old_text: str, new_text: str, message: str, hint: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, FILE.replace(old_text, new_text, 1))
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_without_any_kind_it_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_kinds, "GROUP", "cdc.none")
    with pytest.raises(SettingsError, match="No kind of sink is installed"):
        load(tmp_path, FILE)
