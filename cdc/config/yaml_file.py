"""Read a pipeline file as a tree. Wrong input is named with its line and the accepted form."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from cdc.config import mistakes
from cdc.errors import SettingsError


class _Loader(yaml.SafeLoader):
    """Reads YAML, but for keys that YAML 1.1 takes for truth values: `on` is a name here."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:bool":
                key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


def read_tree(path: Path) -> tuple[str, dict[str, Any]]:
    """Read the file: its text, and its tree. Raises SettingsError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(
            f"The pipeline file {path} can't be read: {error.strerror}.",
            hint=f"name yours with: cdc -p FILE.yaml ...; a first one is written by: cdc -p {path} init",
        ) from None
    except UnicodeDecodeError:
        raise SettingsError(
            f"The pipeline file {path} isn't text in UTF-8.", hint=mistakes.INIT_HINT
        ) from None
    return text, _parse(path, text)


@lru_cache(maxsize=4)
def _parse(path: Path, text: str) -> dict[str, Any]:
    """Parse a file's text. Nobody changes the tree: a run reads its file again every few seconds, and
    parsing takes 0.4 ms a line.
    """
    try:
        tree = yaml.load(text, _Loader)  # noqa: S506  # a SafeLoader
    except yaml.YAMLError as error:
        raise mistakes.yaml_error(path, text, error) from None
    if not isinstance(tree, dict):
        raise SettingsError(f"{path}: a pipeline file is a mapping.", hint=mistakes.INIT_HINT)
    if duplicate := mistakes.duplicate_error(path, text):
        raise duplicate
    return tree
