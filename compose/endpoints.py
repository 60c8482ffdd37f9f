"""Addresses of a stack's servers: all that the rest of the project knows of them."""

from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

STATE_DATABASE = "/8"
"""Path of the database, on the cache's server, for the state of documents. A cache begins at 0 and
takes the next one for a rebuild, so that this one stays free.
"""


@dataclass(frozen=True)
class Endpoints:
    """Addresses and folders of a running stack. `postgres` logs in as an administrator."""

    postgres: str
    kafka: str
    connect: str
    elasticsearch: str
    redis: str
    warehouse: str
    state: str

    def to_dict(self) -> dict[str, str]:
        """Return what `cdc up --json` prints."""
        return asdict(self)

    def environment(self) -> dict[str, str]:
        """Return the variables that a pipeline file may refer to."""
        addresses = {
            f"CDC_{name.upper()}": value for name, value in asdict(self).items() if name != "state"
        }
        return {
            **addresses,
            "CDC_DOCUMENTS": urlsplit(self.redis)._replace(path=STATE_DATABASE).geturl(),
        }
