"""The members of Delta's own classes that `jvm` calls, and the check that they are there.

A call goes through the member that declares it, so none can be made that isn't checked.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cdc.errors import SettingsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VERSION = "4.4.0"
"""The version of delta-spark that has these members."""
PACKAGE = "org.apache.spark.sql.delta"
FIELD = "MODULE$"
"""The field of a Scala object that has the object itself."""


@dataclass(frozen=True)
class Member:
    """A method, constructor or object of a Java class as it is called.

    owner: the class, within PACKAGE. name: a constructor has that of its class, an object is called
    FIELD. types: those of the parameters, without their packages.
    """

    owner: str
    name: str
    types: tuple[str, ...] = ()

    @property
    def class_name(self) -> str:
        """The full name of its class."""
        return f"{PACKAGE}.{self.owner}"

    @property
    def getter(self) -> str:
        """The method of Java's reflection that lists such members."""
        if self.name == FIELD:
            return "getFields"
        is_constructor = self.name == self.owner.rpartition(".")[2]
        return "getConstructors" if is_constructor else "getMethods"

    def __str__(self) -> str:
        types = "" if self.name == FIELD else f"({', '.join(self.types)})"
        return f"{self.owner}.{self.name}{types}"

    def __call__(self, receiver: Any, *arguments: Any) -> Any:
        """Call the method of an object, or the static one of a class."""
        if len(arguments) != len(self.types):
            raise TypeError(f"{self} was called with {len(arguments)} arguments.")
        return getattr(receiver, self.name)(*arguments)


MEMBERS: list[Member] = []


def _declare(owner: str, name: str, *types: str) -> Member:
    """Declare a member that is called by `jvm`."""
    MEMBERS.append(Member(owner, name, types))
    return MEMBERS[-1]


_LOG, _TRANSACTION, _FILE = "DeltaLog", "OptimisticTransaction", "actions.AddFile"
_VECTOR = "actions.DeletionVectorDescriptor"
open_log = _declare(_LOG, "forTable", "SparkSession", "String")
start_transaction = _declare(_LOG, "startTransaction", "Option", "Option")
update = _declare(_LOG, "update", "boolean", "Option", "Option")
snapshot_at = _declare(_LOG, "getSnapshotAt", "long", "Option", "Option", "boolean")
data_path = _declare(_LOG, "dataPath")
create_frame = _declare(_LOG, "createDataFrame", "SnapshotDescriptor", "Seq", "boolean", "Option")
read_whole_table = _declare(_TRANSACTION, "readWholeTable")
base_snapshot = _declare(_TRANSACTION, "snapshot")
metadata = _declare(_TRANSACTION, "metadata")
update_metadata = _declare(_TRANSACTION, "updateMetadata", "Metadata", "boolean")
update_protocol = _declare(_TRANSACTION, "updateProtocol", "Protocol")
commit = _declare(_TRANSACTION, "commit", "Seq", "DeltaOperations$Operation")
log_of = _declare("Snapshot", "deltaLog")
version = _declare("Snapshot", "version")
all_files = _declare("Snapshot", "allFiles")
metadata_of = _declare("Snapshot", "metadata")
protocol_of = _declare("Snapshot", "protocol")
schema_text = _declare("actions.Metadata", "schemaString")
configuration = _declare("actions.Metadata", "configuration")
copy_metadata = _declare(
    *("actions.Metadata", "copy", "String", "String", "String", "Format", "String"),
    *("Seq", "Map", "Option"),
)
remove_feature = _declare("actions.Protocol", "removeFeature", "TableFeature")
file_json = _declare(_FILE, "json")
file_path = _declare(_FILE, "absolutePath", "DeltaLog")
file_vector = _declare(_FILE, "deletionVector")
physical_rows = _declare(_FILE, "numPhysicalRecords")
remove = _declare(_FILE, "remove")
remove_rows = _declare(_FILE, "removeRows", "DeletionVectorDescriptor", "boolean", "boolean")
copy_file = _declare(
    *(_FILE, "copy", "String", "Map", "long", "long", "boolean", "String", "Map"),
    *("DeletionVectorDescriptor", "Option", "Option", "Option", "Option", "Option"),
)
is_on_disk = _declare(_VECTOR, "isOnDisk")
vector_path = _declare(_VECTOR, "absolutePath", "Path")
vector_size = _declare(_VECTOR, "sizeInBytes")
cardinality = _declare(_VECTOR, "cardinality")
vector_offset = _declare(_VECTOR, "offset")
last_row = _declare(_VECTOR, "maxRowIndex")
vector_text = _declare(_VECTOR, "serializeToBase64")
vector_on_disk = _declare(
    *(f"{_VECTOR}$", "onDiskWithRelativePath", "UUID", "String", "int", "long"),
    *("Option", "Option"),
)
action_of_json = _declare("actions.Action$", "fromJson", "String")
set_transaction = _declare("actions.SetTransaction", "SetTransaction", "String", "long", "Option")
build_vectors = _declare(
    *("commands.DeletionVectorBitmapGenerator$", "buildDeletionVectors"),
    *("SparkSession", "Dataset", "DeltaLog", "int"),
)
result_path = _declare("commands.DeletionVectorResult", "filePath")
result_vector = _declare("commands.DeletionVectorResult", "deletionVector")
streaming_update = _declare(
    *("DeltaOperations$StreamingUpdate", "DeltaOperations$StreamingUpdate"),
    *("OutputMode", "String", "long", "Option"),
)
drop_feature = _declare(
    *("DeltaOperations$DropTableFeature", "DeltaOperations$DropTableFeature"),
    *("String", "boolean"),
)
manual_update = _declare("DeltaOperations$ManualUpdate$", FIELD)
vectors_feature = _declare("DeletionVectorsTableFeature$", FIELD)


def require_members(spark: "SparkSession") -> None:
    """Raise SettingsError where Spark's process lacks one of MEMBERS."""
    if missing := missing_members(MEMBERS, _reflection(spark)):
        more = len(missing) - 1
        others = f", nor {'is 1 other' if more == 1 else f'are {more} others'}" if more else ""
        raise SettingsError(
            f"A warehouse needs delta-spark {VERSION} (this is {_delta_version(spark)}):"
            f" {missing[0]} isn't there{others}.",
            hint="cdc brings its own: take other jars of Delta out of Spark's folder, SPARK_HOME/jars",
        )


def _reflection(spark: "SparkSession") -> Callable[[Member], str | None]:
    """Make the function that prints members like one by reflection: see `missing_members`."""
    from py4j.protocol import Py4JJavaError

    java: Any = spark._jvm
    # Each name with a dot is asked for in Spark's process: once, not for each class.
    load, print_array = java.java.lang.Class.forName, java.scala.runtime.ScalaRunTime.stringOf
    loader = java.java.lang.Thread.currentThread().getContextClassLoader()

    def describe(member: Member) -> str | None:
        try:
            members = getattr(load(member.class_name, False, loader), member.getter)()
        except Py4JJavaError:
            return None
        return str(print_array(members))

    return describe


def _delta_version(spark: "SparkSession") -> str:
    from py4j.protocol import Py4JError

    java: Any = spark._jvm
    try:
        return str(getattr(java.io.delta, "package").VERSION())  # noqa: B009  # a word of Scala's
    except (Py4JError, TypeError):
        return "none, or an old one"


def missing_members(
    members: Iterable[Member], describe: Callable[[Member], str | None]
) -> list[Member]:
    """List those members that aren't there.

    describe: prints all members of the same class that are of the same kind, by reflection; None
    where there is no such class. It is called once for them.
    """
    present: dict[tuple[str, str], set[tuple[str, tuple[str, ...]]]] = {}
    missing = []
    for member in members:
        like = member.owner, member.getter
        if like not in present:
            present[like] = set(_signatures(describe(member) or ""))
        if (member.name, member.types) not in present[like]:
            missing.append(member)
    return missing


def _signatures(text: str) -> Iterable[tuple[str, tuple[str, ...]]]:
    """Read names and types of an array of members, `Array(public int a.B.c(d.E,f.G) throws h.I, ...)`.

    A field has no parentheses.
    """
    for declaration in text.removeprefix("Array(").removesuffix(")").split(", "):
        name, _, types = declaration.partition(" throws ")[0].partition("(")
        yield (
            name.rpartition(".")[2],
            tuple(type_.rpartition(".")[2] for type_ in types.rstrip(")").split(",") if type_),
        )
