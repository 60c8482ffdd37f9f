"""Explain a mistake in a pipeline file in the words of the file: its line, the accepted form, what
to write instead.

In:  the file's text and what yaml, pydantic or `references` found. Out: SettingsError.
Invariant: no value is quoted, since any value may be a password in the wrong place.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from cdc.config.references import SECURED_VARIABLES, STACK_VARIABLES, Reference
from cdc.errors import SettingsError

INIT_HINT = "a whole file, with comments, is written by: cdc -p NEW.yaml init"
QUOTED = re.compile(r"(['\"])[^'\"]{2,}\1")
UNQUOTED_REFERENCE = re.compile(r"[{,].*?[\s:]\$\{([A-Za-z_][A-Za-z0-9_]*)")
"""A reference without quotes inside of { }."""
PAUSE = re.compile(r"[.;:](?:\s|$)")
PROBLEMS: Mapping[str, str] = {
    "missing": "required, but missing",
    "too_short": "at least one is needed",
    "tuple_type": "a list is needed: [a, b]",
    "list_type": "a list is needed: [a, b]",
    "dict_type": "settings are needed: {{name: value}}",
    "model_type": "settings are needed: {{name: value}}",
    "model_attributes_type": "settings are needed: {{name: value}}",
    "string_type": "a text is needed (in quotes, where it looks like a number)",
    "int_type": "a whole number is needed",
    "int_parsing": "a whole number is needed",
    "int_from_float": "a whole number is needed",
    "float_type": "a number is needed",
    "float_parsing": "a number is needed",
    "finite_number": "a number is needed",
    "bool_type": "true or false is needed",
    "bool_parsing": "true or false is needed",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be {ge:g} or more",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be {le:g} or less",
    "literal_error": "must be {expected}",
    "union_tag_not_found": "its type is missing",
    "union_tag_invalid": "no such sink type",
}
"""By pydantic's type of a mistake; its own messages use the words of Python."""


class InvalidSetting(ValueError):
    """A check refuses the value of a setting: the problem, and a hint what to write instead.

    `keys` lead from the setting that is checked to the one within it that is wrong.
    """

    def __init__(self, problem: str, hint: str, keys: Sequence[str] = ()) -> None:
        super().__init__(problem)
        self.hint = hint
        self.keys = tuple(keys)


def yaml_error(path: Path, text: str, error: yaml.YAMLError) -> SettingsError:
    mark = getattr(error, "problem_mark", None)
    line = ""
    prefix = ""
    content = ""
    if mark:
        line = f":{mark.line + 1}"
        content = [*text.splitlines(), ""][mark.line]
        prefix = content[: mark.column + 1]
    reference = UNQUOTED_REFERENCE.search(content)
    if reference and "$" in prefix:
        return SettingsError(
            f"{path}{line}: ${{{reference[1]}}} inside of {{ }} is taken apart: its braces are YAML's there.",
            hint=f'quote it: "${{{reference[1]}}}"',
        )
    if (
        "*" in prefix
        and "alias" in f"{getattr(error, 'context', '')} {getattr(error, 'problem', '')}"
    ):
        return SettingsError(
            f"{path}{line}: a text that begins with * is taken for something else.",
            hint='quote it: "*.*"',
        )
    # YAML's message may quote a password that isn't in quotes itself: one that begins with * or !.
    problem = QUOTED.sub("'...'", getattr(error, "problem", None) or "not YAML")
    return SettingsError(f"{path}{line}: {problem}.", hint=INIT_HINT)


def duplicate_error(path: Path, text: str) -> SettingsError | None:
    """The error for a setting that occurs twice, of which YAML would silently take the last, if there is one."""
    lines: dict[tuple[str, ...], int] = {}
    for keys, line in _settings(yaml.compose(text)):
        if keys in lines:
            return SettingsError(
                f"{path}:{line}: {'.'.join(keys)} is there twice: the first is on line {lines[keys]}.",
                hint="take one of them out",
            )
        lines[keys] = line
    return None


def _settings(node: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """The path of keys to every setting and every item of a list, with its line."""
    parts: list[tuple[str, Any, Any]] = []
    if isinstance(node, yaml.MappingNode):
        parts = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        parts = [(str(number), value, value) for number, value in enumerate(node.value)]
    for name, begin, value in parts:
        yield (*keys, name), begin.start_mark.line + 1
        yield from _settings(value, (*keys, name))


def reference_error(path: Path, text: str, reference: Reference) -> SettingsError:
    prefix = f"{place(path, text, reference.keys)}: {'.'.join(reference.keys)}"
    name = reference.name
    if error := reference.unreadable:
        return SettingsError(f"{prefix}: {error.message}", hint=error.hint)
    if name is None:
        return SettingsError(
            f"{prefix} has {reference.text}, which is no reference.",
            hint="write ${NAME}, ${NAME:-default} for where it may be unset, or ${file:/path}",
        )
    stack = (
        f", or start local servers, which set it: cdc -p {path} up{' --secured' if name in SECURED_VARIABLES else ''}"
        if name in STACK_VARIABLES
        else ""
    )
    near = difflib.get_close_matches(name, STACK_VARIABLES, n=1, cutoff=0.85)
    suggestion = f"did you mean ${{{near[0]}}}? else " if near and not stack else ""
    return SettingsError(
        f"{prefix} refers to ${{{name}}}, which is not set.",
        hint=f"{suggestion}export {name}=...{stack}",
        variable=name,
    )


def validation_error(
    path: Path, text: str, error: ValidationError, model: type[BaseModel]
) -> SettingsError:
    """The error for the first mistake.

    An unknown setting comes first: it may be a required one, misspelt.
    """
    listed = error.errors(include_url=False)
    first = next((each for each in listed if each["type"] == "extra_forbidden"), listed[0])
    keys, kinds = _resolve(model, first["loc"])
    problem, hint = _describe(first, keys, kinds)
    if first["type"] == "value_error":
        keys += getattr(first["ctx"]["error"], "keys", ())
    return setting_error(path, text, keys, problem, hint)


def setting_error(
    path: Path, text: str, keys: Sequence[str], problem: str, hint: str
) -> SettingsError:
    return SettingsError(
        f"{place(path, text, keys)}: {'.'.join(keys) or 'the file'}: {problem}.", hint=hint
    )


def place(path: Path, text: str, keys: Sequence[str]) -> str:
    """`file:line` of the deepest of the nested keys that the text has."""
    lines = dict(_settings(yaml.compose(text)))
    paths = [tuple(keys[:length]) for length in range(len(keys), 0, -1)]
    line = next((lines[inner] for inner in paths if inner in lines), None)
    return f"{path}:{line}" if line else str(path)


def _describe(mistake: Any, keys: Sequence[str], kinds: Sequence[Any]) -> tuple[str, str]:
    kind = mistake["type"]
    context = mistake.get("ctx", {})
    section: Any = kinds[-2] if len(kinds) > 1 else None
    names = sorted(_fields(section))
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(keys[-1], names, n=1)
        suggestion = f"did you mean {near[0]}? " if near else ""
        return "no such setting", f"{suggestion}accepted here: {', '.join(names)}"
    if kind == "value_error":
        return str(context["error"]), getattr(context["error"], "hint", INIT_HINT)
    if kind.startswith("union_tag"):
        return PROBLEMS[kind], f"type: {' or '.join(_tags(kinds[-1]))}"
    if kind == "string_pattern_mismatch":
        return _pattern_problem(keys, section)
    if mistake["input"] is None and kind != "missing":
        return "is empty", _example(keys, section)
    problem = PROBLEMS[kind].format(**context) if kind in PROBLEMS else "isn't accepted"
    if kind == "missing" and (purpose := _purpose(keys[-1], section)):
        problem += f": {purpose}"
    return problem, _example(keys, section)


def _pattern_problem(keys: Sequence[str], section: Any) -> tuple[str, str]:
    if keys[-1] == "table":
        return (
            "a table is written schema.table",
            "for example: public.flights; a name with a dot can't be one",
        )
    if keys[0] == "sinks" and not _is_section(section):
        return (
            "a sink's name begins with a letter and has lower case letters, digits, _ and -",
            "for example: search",
        )
    return f"takes {_fields(section)[keys[-1]].description}", _example(keys, section)


def _example(keys: Sequence[str], section: Any) -> str:
    field = _fields(section).get(keys[-1]) if keys else None
    example = f"for example: {keys[-1]}: {field.examples[0]}" if field and field.examples else ""
    return example or INIT_HINT


def _purpose(name: str, section: Any) -> str:
    """What a setting is for: its description up to the first pause."""
    field = _fields(section).get(name)
    words = PAUSE.split(field.description or "")[0] if field else ""
    return words[:1].lower() + words[1:].replace("\n", " ")


def _resolve(model: type[BaseModel], loc: Sequence[str | int]) -> tuple[list[str], list[Any]]:
    """The file's keys to a mistake, without pydantic's names; the types of it and of all that it lies in."""
    keys: list[str] = []
    kinds: list[Any] = [model]
    for part in loc:
        kind = kinds[-1]
        tagged = {tag: member for member in _members(kind) for tag in _tags(member)}
        if part in tagged:
            kinds[-1] = tagged[str(part)]
        elif part != "[key]":
            keys.append(str(part))
            inside = _inside(kind, part)
            members = _members(inside)
            kinds.append(members[0] if len(members) == 1 else inside)
    return keys, kinds


def _inside(kind: Any, part: str | int) -> Any:
    if _is_section(kind):
        field = _fields(kind).get(str(part))
        return field.annotation if field else None
    return {dict: get_args(kind)[1:2], tuple: get_args(kind)[:1], list: get_args(kind)}.get(
        get_origin(kind), [None]
    )[0]


def _members(kind: Any) -> list[Any]:
    """The members of a union except None; any other type is its only member."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        inner = [member for part in get_args(kind) for member in _members(part)]
        return [member for member in inner if member is not NoneType]
    return [kind]


def _tags(kind: Any) -> list[str]:
    """The values of `type`, or tags, by which the members of a union are chosen."""
    tags: list[str] = []
    for section in filter(_is_section, _members(kind)):
        if hasattr(section, "tag"):
            tags.append(section.tag)
        elif field := section.model_fields.get("type"):
            tags += map(str, get_args(field.annotation))
    return tags


def _fields(kind: Any) -> dict[str, FieldInfo]:
    """The settings of a section by their names in the file; none of what is no section."""
    fields = kind.model_fields.items() if _is_section(kind) else ()
    return {field.alias or name: field for name, field in fields}


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
