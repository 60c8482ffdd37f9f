"""The members of Delta's own classes that `jvm` calls, and the check that they are there.

A call goes through the member that declares it, so none can be made that isn't checked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from cdc.errors import SettingsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VERSION = "4.4.0"
"""The version of delta-spark that has these members."""
PACKAGE = "org.apache.spark.sql.delta"
FIELD = "MODULE$"
"""The field of a Scala object that has the object itself."""


_TYPES = {
    "boolean": "Z",
    "int": "I",
    "long": "J",
    "Dataset": "Lorg/apache/spark/sql/Dataset;",
    "Map": "Lscala/collection/immutable/Map;",
    "Option": "Lscala/Option;",
    "OutputMode": "Lorg/apache/spark/sql/streaming/OutputMode;",
    "Path": "Lorg/apache/hadoop/fs/Path;",
    "Seq": "Lscala/collection/immutable/Seq;",
    "SparkSession": "Lorg/apache/spark/sql/SparkSession;",
    "String": "Ljava/lang/String;",
    "UUID": "Ljava/util/UUID;",
}
"""Java's descriptors of types that aren't Delta's."""


@dataclass(frozen=True)
class Member:
    """A method, constructor or object of a Java class as it is called.

    owner: the class, within PACKAGE. name: a constructor has that of its class, an object is called
    FIELD. types: those of the parameters, one of _TYPES or a class within PACKAGE.
    """

    owner: str
    name: str
    types: tuple[str, ...] = ()

    @property
    def class_name(self) -> str:
        """The full name of its class."""
        return f"{PACKAGE}.{self.owner}"

    @property
    def is_constructor(self) -> bool:
        """Whether it makes an object of its class."""
        return self.name == self.owner.rpartition(".")[2]

    @property
    def descriptor(self) -> str:
        """Java's descriptor of a method with such parameters."""
        return f"({''.join(map(_descriptor, self.types))})V"

    def __str__(self) -> str:
        types = "" if self.name == FIELD else f"({', '.join(self.types)})"
        return f"{self.owner}.{self.name}{types}"

    def __call__(self, receiver: Any, *arguments: Any) -> Any:
        """Call the method of an object, or the static one of a class."""
        if len(arguments) != len(self.types):
            raise TypeError(f"{self} was called with {len(arguments)} arguments.")
        return getattr(receiver, self.name)(*arguments)


def _descriptor(name: str) -> str:
    return _TYPES.get(name) or f"L{PACKAGE}.{name};".replace(".", "/")


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
update_metadata = _declare(_TRANSACTION, "updateMetadata", "actions.Metadata", "boolean")
update_protocol = _declare(_TRANSACTION, "updateProtocol", "actions.Protocol")
commit = _declare(_TRANSACTION, "commit", "Seq", "DeltaOperations$Operation")
log_of = _declare("Snapshot", "deltaLog")
version = _declare("Snapshot", "version")
all_files = _declare("Snapshot", "allFiles")
metadata_of = _declare("Snapshot", "metadata")
protocol_of = _declare("Snapshot", "protocol")
schema_text = _declare("actions.Metadata", "schemaString")
configuration = _declare("actions.Metadata", "configuration")
copy_metadata = _declare(
    *("actions.Metadata", "copy", "String", "String", "String", "actions.Format", "String"),
    *("Seq", "Map", "Option"),
)
remove_feature = _declare("actions.Protocol", "removeFeature", "TableFeature")
file_json = _declare(_FILE, "json")
file_path = _declare(_FILE, "absolutePath", "DeltaLog")
file_vector = _declare(_FILE, "deletionVector")
physical_rows = _declare(_FILE, "numPhysicalRecords")
remove = _declare(_FILE, "remove")
remove_rows = _declare(
    _FILE, "removeRows", "actions.DeletionVectorDescriptor", "boolean", "boolean"
)
copy_file = _declare(
    *(_FILE, "copy", "String", "Map", "long", "long", "boolean", "String", "Map"),
    *("actions.DeletionVectorDescriptor", "Option", "Option", "Option", "Option", "Option"),
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
    is_there = _look_up(spark)
    if missing := [member for member in MEMBERS if not is_there(member)]:
        more = len(missing) - 1
        others = f", nor {'is 1 other' if more == 1 else f'are {more} others'}" if more else ""
        raise SettingsError(
            f"A warehouse needs delta-spark {VERSION} (this is {_delta_version(spark)}):"
            f" {missing[0]} isn't there{others}.",
            hint="cdc brings its own: take other jars of Delta out of Spark's folder, SPARK_HOME/jars",
        )


def _look_up(spark: "SparkSession") -> Callable[[Member], bool]:
    """Make the function that tells whether a member is in Spark's process.

    Not by a list of all members: an answer of more than 8 KB takes 40 ms, as TCP delays it.
    """
    from py4j.protocol import Py4JJavaError

    java: Any = spark._jvm
    # Each part of a name is asked for in Spark's process, so that is done once.
    load, parse = (
        java.java.lang.Class.forName,
        java.java.lang.invoke.MethodType.fromMethodDescriptorString,
    )
    loader = java.java.lang.Thread.currentThread().getContextClassLoader()
    class_of = cache(lambda name: load(name, False, loader))
    types_of = cache(lambda descriptor: parse(descriptor, loader).parameterArray())

    def is_there(member: Member) -> bool:
        try:
            class_ = class_of(member.class_name)
            if member.name == FIELD:
                class_.getField(FIELD)
            elif member.is_constructor:
                class_.getConstructor(types_of(member.descriptor))
            else:
                class_.getMethod(member.name, types_of(member.descriptor))
        except Py4JJavaError:
            return False
        return True

    return is_there


def _delta_version(spark: "SparkSession") -> str:
    from py4j.protocol import Py4JError

    java: Any = spark._jvm
    try:
        return str(getattr(java.io.delta, "package").VERSION())  # noqa: B009  # a word of Scala's
    except (Py4JError, TypeError):
        return "none, or an old one"
