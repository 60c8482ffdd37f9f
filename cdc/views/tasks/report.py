"""What a task of the engine tells of itself. It travels as JSON, from an executor to the driver."""

import msgspec

from cdc.sink.lane import Failure

_encode = msgspec.json.Encoder().encode


class Report(msgspec.Struct):
    """What a task has done. A failure travels as data: a key of `cdc.sink.remedy.REPORTED`."""

    documents: int = 0
    done: bool = False
    """Whether nothing was dirty any more at its end."""
    failure: str | None = None
    message: str = ""

    def encode(self) -> bytes:
        """Write it as JSON."""
        return _encode(self)


_decode = msgspec.json.Decoder(Report).decode


def read_report(encoded: bytes) -> Report:
    """Decode what a task reports. Raises Failure: what it reports as failed."""
    report = _decode(encoded)
    if report.failure:
        raise Failure(report.failure, report.message)
    return report
