"""Deletion vectors: which rows of a file are deleted, in Delta's portable format.

Delta's protocol describes the bytes: a number, then a 64-bit Roaring bitmap in its portable form. A
vector is kept in a file of the table's folder, `u`; vectors of others may also be in the log itself, `i`,
or anywhere, `p`. We write one file a commit. Never `i`: VACUUM of delta-spark 4.4 fails at it
(`VacuumCommand.getDeletionVectorRelativePathAndSize` has no case for it).
"""

import struct
import zlib
from base64 import b85decode, b85encode
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from pyroaring import BitMap64

from cdc.errors import SinkRejected
from cdc.sinks.delta.place import Place, locate

MAGIC = struct.pack("<I", 1681511377)
CHARACTERS = (
    b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
)
"""Of base 85 as ZeroMQ writes it, in which the log has the id of a vector's file."""
PYTHONS = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
"""Of base 85 as Python writes it."""
TO_CHARACTERS = bytes.maketrans(PYTHONS, CHARACTERS)
FROM_CHARACTERS = bytes.maketrans(CHARACTERS, PYTHONS)
ID_CHARACTERS = 20
FRAME_BYTES = 8
"""A vector's size before it, and a checksum after it."""
DAMAGED_HINT = "restore its file from a backup, or make the view again with `rebuild`"
Descriptor = Mapping[str, Any]
"""What the log has of a vector: storageType, pathOrInlineDv, offset, sizeInBytes, cardinality."""


class VectorFile:
    """The vectors of one commit, for one file of a new id. name: in the table's folder."""

    def __init__(self, file_id: UUID) -> None:
        self.name = f"deletion_vector_{file_id}.bin"
        self._id = file_id
        self._data = bytearray(b"\x01")

    @property
    def data(self) -> bytes:
        """The file's bytes; none where nothing was added."""
        return bytes(self._data) if len(self._data) > 1 else b""

    def add(self, rows: BitMap64) -> dict[str, Any]:
        """Add the numbers of a file's deleted rows. Returns what the log has of them."""
        vector = MAGIC + rows.serialize()
        descriptor = {
            "storageType": "u",
            "pathOrInlineDv": encode85(self._id.bytes),
            "offset": len(self._data),
            "sizeInBytes": len(vector),
            "cardinality": len(rows),
        }
        self._data += _framed(vector)
        return descriptor


def deleted_rows(descriptor: Descriptor, place: Place) -> BitMap64:
    """Read which rows of a file of a place are deleted, by their numbers from 0 on.

    Raises SinkUnavailable; SinkRejected: the vector is damaged, or of a format that isn't known.
    """
    size = descriptor["sizeInBytes"]
    try:
        if (path := vector_path(descriptor)) is None:
            vector = decode85(descriptor["pathOrInlineDv"])[:size]
        else:
            framed = place.read_range(path, descriptor.get("offset", 1), size + FRAME_BYTES)
            vector = framed[4:-4]
            if framed != _framed(vector) or len(vector) != size:
                raise ValueError
        if vector[:4] != MAGIC:
            raise ValueError
        return BitMap64.deserialize(vector[4:])
    except (ValueError, IndexError):
        raise SinkRejected(
            f"A deletion vector of the Delta table {place.location} can't be read: it is damaged, or in a format"
            " that isn't known.",
            hint=DAMAGED_HINT,
        ) from None


def vector_path(descriptor: Descriptor) -> str | None:
    """Where a vector is: a path in the table's folder, or an absolute one; None: in the log."""
    text: str = descriptor["pathOrInlineDv"]
    if descriptor["storageType"] == "i":
        return None
    if descriptor["storageType"] == "p":
        return locate("", text)
    folder = text[:-ID_CHARACTERS]
    name = VectorFile(UUID(bytes=decode85(text[-ID_CHARACTERS:]))).name
    return f"{folder}/{name}" if folder else name


def vector_id(file: Mapping[str, Any]) -> str | None:
    """Return the text by which a file's vector differs from another one of the same file, as the protocol
    says; None where it has none.
    """
    if (descriptor := file.get("deletionVector")) is None:
        return None
    place = f"{descriptor['storageType']}{descriptor['pathOrInlineDv']}"
    offset = descriptor.get("offset")
    return place if offset is None else f"{place}@{offset}"


def moved(descriptor: Descriptor) -> Descriptor:
    """Describe a vector whose file has been put into the folder of another table, under its name."""
    path = vector_path(descriptor)
    if path is None:
        return descriptor
    file_id = UUID(path.rpartition("_")[2].removesuffix(".bin"))
    return {**descriptor, "storageType": "u", "pathOrInlineDv": encode85(file_id.bytes)}


def encode85(data: bytes) -> str:
    """Encode bytes, in number a multiple of 4."""
    return b85encode(data).translate(TO_CHARACTERS).decode()


def decode85(text: str) -> bytes:
    return b85decode(text.encode().translate(FROM_CHARACTERS))


def bitmap(data: bytes | None) -> BitMap64:
    """Read a bitmap as `BitMap64.serialize` writes it; an empty one for None."""
    return BitMap64.deserialize(data) if data else BitMap64()


def _framed(vector: bytes) -> bytes:
    return struct.pack(">I", len(vector)) + vector + struct.pack(">I", zlib.crc32(vector))
