"""Delta's own classes: one module calls them, and only what is looked up before."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.compose import versions
from cdc.sinks.delta.log import private_members
from cdc.sinks.delta.log.private_members import MEMBERS, VERSION, Member
from tests.support.pages import ROOT

LOG = ROOT / "sinks/delta/log"
DOORS = {"_jvm", "_jsparkSession", "_jdf"}
"""How PySpark lets Python reach the objects of Spark's process."""
PROMISED = {
    *("ArrayList", "add", "fromString", "get", "getProperty", "toASCIIString", "toUri"),
    *("_1", "_2", "apply", "asJava", "asScala", "removed", "toSeq"),
    *("productArity", "productElement", "productElementName"),
    *("Update", "collectAsList", "setActiveSession"),
    *("keys", "rpartition", "split", "to_json"),
}
"""Methods of Java, Scala, Spark and Python that `jvm` calls; their libraries promise them."""


def attributes(tree: ast.AST) -> Iterator[str]:
    return (node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def modules_that_enter(folder: Path) -> set[str]:
    """The modules that reach into Spark's process for what isn't promised, or name its classes."""
    entering = set()
    for package in ("cdc", "sinks"):
        for path in (folder / package).rglob("*.py"):
            source = path.read_text()
            named = f"{private_members.PACKAGE}." in source.replace(".catalog.DeltaCatalog", "")
            if named or DOORS & set(attributes(ast.parse(source))):
                entering.add(str(path.relative_to(folder)))
    return entering


def undeclared(source: str) -> set[str]:
    """The methods that a module calls past the declared members."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    methods = {
        call.attr
        for call in calls
        if isinstance(call, ast.Attribute)
        and ast.unparse(call.value) not in ("members", "links", "json")
    }
    return methods - PROMISED


def test_one_module_calls_what_delta_does_not_promise() -> None:
    assert modules_that_enter(ROOT) == {
        f"sinks/delta/log/{name}.py" for name in ("jvm", "private_members")
    }


def test_planted_a_module_that_enters(tmp_path: Path) -> None:
    folder = tmp_path / "cdc"
    folder.mkdir()
    (tmp_path / "sinks").mkdir()
    (folder / "a.py").write_text("log = spark._jvm.org\n")
    (folder / "b.py").write_text('name = "org.apache.spark.sql.delta.DeltaLog"\n')
    (folder / "c.py").write_text('"org.apache.spark.sql.delta.catalog.DeltaCatalog"\n')
    assert modules_that_enter(tmp_path) == {"cdc/a.py", "cdc/b.py"}


def test_objects_of_delta_are_called_nowhere_else() -> None:
    """Java's names have humps; others that have are those of PySpark's interface."""
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession, types

    names = {
        name for public in (DataFrame, SparkSession, SparkContext, types) for name in dir(public)
    }
    public = names | {name for class_ in vars(types).values() for name in dir(class_)}
    humps = {
        (path.name, name)
        for path in (ROOT / "sinks/delta").rglob("*.py")
        if path.name not in ("jvm.py", "private_members.py")
        for name in attributes(ast.parse(path.read_text()))
        if name != name.lower()
        and name != name.upper()
        and name[0].islower()
        and name not in public
    }
    assert humps == set()


def test_every_call_is_declared() -> None:
    assert undeclared((LOG / "jvm.py").read_text()) == set()
    assert undeclared("members.version(log)\nlog.startTransaction()\n") == {"startTransaction"}


def uncalled(names: list[str], source: str) -> list[str]:
    return [name for name in names if not re.search(rf"\bmembers\.{name}\b", source)]


def test_every_declared_member_is_called() -> None:
    source = (LOG / "jvm.py").read_text()
    declared = [name for name, value in vars(private_members).items() if isinstance(value, Member)]
    assert len(declared) == len(MEMBERS)
    assert uncalled(declared, source) == []
    assert uncalled(["remove"], "members.remove_rows(file)") == ["remove"]


def test_types_are_those_of_java() -> None:
    types = ("long", "Option", "DeltaOperations$Operation", "actions.Protocol")
    delta = "Lorg/apache/spark/sql/delta/"
    assert Member("DeltaLog", "f", types).descriptor == (
        f"(JLscala/Option;{delta}DeltaOperations$Operation;{delta}actions/Protocol;)V"
    )


def test_a_call_with_other_arguments_than_declared_is_refused() -> None:
    assert Member("str", "upper")("a") == "A"
    with pytest.raises(TypeError, match=r"Log\.open\(Session, String\) was called with 1"):
        Member("Log", "open", ("Session", "String"))(object(), "session")


def test_the_version_is_that_of_the_stack() -> None:
    assert versions.DELTA == VERSION
