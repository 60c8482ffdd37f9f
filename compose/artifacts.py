"""Files of the stack: fetched once by pyspark's own Ivy, checked against pinned sha256, cached per
user.

A group (servers, Spark jars) is built in a temporary folder and renamed into place when every file
has passed, so what lies in the cache is whole and a second use needs no network. `python -m
cdc.compose.artifacts` fetches servers and jars ahead of use; with `--pin` it writes new checksums, after
a change of versions.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread

from tenacity import retry, retry_if_exception_type, stop_after_attempt

from cdc.compose.host import java, require_disk, share
from cdc.errors import StackError

FOLDER = Path(__file__).parent
PINS = FOLDER / "artifacts.sha256"
# A stalled connection would hold the fetch for ever without it. The whole set takes about two
# minutes.
FETCH_TIMEOUT_S = 900
SILENT_S = 4.0
"""Seconds between two messages about the progress of a fetch."""


def say(line: str) -> None:
    """Print a line about slow work on standard error, because standard output belongs to the
    verb.
    """
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def cache_dir() -> Path:
    """Return the folder that pipelines share: `CDC_CACHE`, else root's system folder or the user's
    cache.
    """
    if path := os.environ.get("CDC_CACHE"):
        return Path(path).absolute()
    if os.geteuid() == 0:
        return Path("/var/cache/cdc")
    from platformdirs import user_cache_path

    return user_cache_path("cdc")


def spark_jars() -> list[Path]:
    """Return the jars that Spark must be given, fetching them first when the cache lacks them."""
    return sorted((_group("spark") / "spark").glob("*.jar"))


def servers() -> Path:
    """Return the folder of the servers' files, fetching them first when the cache lacks them: `kafka`
    and `connect` with jars, `debezium` with Connect's plugins, `elasticsearch`.
    """
    return _group("servers", _unpack)


def postgres_with_tls() -> Path:
    """Return the folder of the programs of a Postgres that was built with OpenSSL, for Linux on x86,
    fetching it first when the cache lacks it.
    """
    return _group("postgres", _unpack_postgres) / "postgres" / "bin"


def _group(name: str, finish: Callable[[Path], None] = lambda _: None) -> Path:
    """Return the folder of one group; its name carries its checksums: new versions never meet old
    files.
    """
    pins = pinned(name)
    key = hashlib.sha256(repr(sorted(pins.items())).encode()).hexdigest()[:12]
    home = cache_dir() / f"{name}-{key}"

    def fetch(work: Path) -> Path:
        say(f"fetching {name}: {len(pins)} files, once per user")
        with _reporting(name, work):
            retrieve(name, work)
            verify(work / "lib", pins)
            finish(work / "lib")
        return work / "lib"

    if make_once(home, fetch):
        say(f"fetched {name} into {home}")
    return home


def make_once(home: Path, make: Callable[[Path], Path]) -> bool:
    """Make a folder of the cache unless it is there; return whether it has been made now. `make` gets
    a work folder, and returns the one in it that becomes `home` when it is whole.
    """
    if home.is_dir():
        return False
    cache = home.parent
    with _locked(cache):
        if home.is_dir():
            return False
        require_disk(cache, "the cache")
        # Of one that was killed: the lock says that none is at work.
        for leftover in cache.glob(".fetch-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        # On the cache's filesystem, so that a rename is enough.
        with tempfile.TemporaryDirectory(
            prefix=".fetch-", dir=cache, ignore_cleanup_errors=True
        ) as work:
            made = make(Path(work))
            share(made)
            made.rename(home)
    return True


@contextmanager
def _reporting(name: str, work: Path) -> Iterator[None]:
    """Report every few seconds how much has been fetched."""
    finished = Event()

    def report() -> None:
        while not finished.wait(SILENT_S):
            say(f"fetching {name}: {_bytes(work) / 1e6:,.0f} MB so far")

    thread = Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def _bytes(folder: Path) -> int:
    """Sum the sizes of all files; one that vanishes meanwhile counts nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size
        except OSError:
            continue
    return total


@retry(retry=retry_if_exception_type(StackError), stop=stop_after_attempt(3), reraise=True)
def retrieve(name: str, work: Path) -> None:
    """Have Ivy fetch the files of a group into `work/lib`. A second try reuses the files of a
    failed one.
    """
    command: list[str | Path] = [
        java(),
        # Ivy would keep its own settings and a local repository in the home folder.
        f"-Divy.default.ivy.user.dir={work / 'user'}",
        "-jar",
        ivy_jar(),
        *("-ivy", FOLDER / f"ivy-{name}.xml", "-cache", work / "ivy"),
        *("-retrieve", work / "lib" / "[conf]" / "[artifact](-[classifier])-[revision].[ext]"),
    ]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _fetch_failed(name, f"no end after {FETCH_TIMEOUT_S} s") from None
    if run.returncode != 0:
        lines = [
            line.strip() for line in (run.stdout + run.stderr).splitlines() if line.strip(" \t:")
        ]
        raise _fetch_failed(name, "; ".join(lines[-6:]))


def _fetch_failed(name: str, why: str) -> StackError:
    return StackError(
        f"the files of group {name} could not be fetched: {why}",
        hint="check that this machine reaches Maven Central (a proxy: JAVA_TOOL_OPTIONS), then try again",
        group=name,
    )


def ivy_jar() -> Path:
    """Return the Ivy jar inside pyspark, without importing pyspark."""
    spec = find_spec("pyspark")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or []:
        for jar in Path(folder).glob("jars/ivy-*.jar"):
            return jar
    raise StackError("pyspark isn't installed beside cdc", hint="run: make setup")


def pinned(name: str) -> dict[str, str]:
    """Read a group's checksums: path below the group's folder -> sha256 in hex."""
    rows = (line.split(maxsplit=1) for line in PINS.read_text().splitlines())
    prefix = f"{name}/"
    return {path.removeprefix(prefix): digest for digest, path in rows if path.startswith(prefix)}


def verify(lib: Path, pins: dict[str, str]) -> None:
    """Refuse a folder that differs from its pins in any file: missing, added or changed."""
    digests = checksums(lib)
    wrong = sorted(
        path for path in pins.keys() | digests.keys() if pins.get(path) != digests.get(path)
    )
    if wrong:
        raise StackError(
            f"{len(wrong)} fetched files differ from their pinned sha256: {', '.join(wrong[:5])}",
            hint="run the command again; if it stays, something between here and Maven Central changes files",
            group=lib.name,
        )


def checksums(lib: Path) -> dict[str, str]:
    """Hash every file below a folder: relative path -> sha256 in hex."""
    digests = {}
    for path in sorted(lib.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digests[path.relative_to(lib).as_posix()] = hashlib.file_digest(
                    file, "sha256"
                ).hexdigest()
    return digests


def _unpack_postgres(lib: Path) -> None:
    """Replace the jar by what is in the archive that it has."""
    (jar,) = lib.glob("postgres/*.jar")
    with (
        zipfile.ZipFile(jar) as bundle,
        bundle.open("postgres-linux-x86_64.txz") as archive,
        tarfile.open(fileobj=archive, mode="r|xz") as tar,
    ):
        _extract(tar, jar.parent)
    jar.unlink()


def _unpack(lib: Path) -> None:
    """Replace the two archives by their contents."""
    for archive in [*lib.glob("debezium/*.tar.gz"), *lib.glob("elasticsearch/*.zip")]:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as bundle:
                bundle.extractall(archive.parent)  # noqa: S202
                for entry in bundle.infolist():
                    # zipfile drops the permissions, and with them what makes the start script
                    # executable.
                    if mode := entry.external_attr >> 16:
                        (archive.parent / entry.filename).chmod(mode)
        else:
            with tarfile.open(archive) as tar:
                _extract(tar, archive.parent)
        archive.unlink()


def _extract(tar: tarfile.TarFile, folder: Path) -> None:
    # Python before 3.11.4 has no filters; the archive is pinned, so both ways write the same.
    tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
    tar.extractall(folder)  # noqa: S202


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock. The kernel releases it when the process ends, however it ends."""
    try:
        make_shared(folder)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise StackError(
            f"the cache {folder} can't be written: {error.strerror}",
            hint="choose another one with CDC_CACHE",
            path=str(folder),
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_shared(folder: Path) -> None:
    """Create a folder that every user may search, whatever the umask; leave an existing one
    alone.
    """
    if not folder.is_dir():
        make_shared(folder.parent)
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)


def pin() -> None:
    """Fetch all files again and write their checksums."""
    lines = []
    for name in ("postgres", "servers", "spark"):
        with tempfile.TemporaryDirectory() as folder:
            retrieve(name, Path(folder))
            digests = checksums(Path(folder) / "lib")
        lines += [f"{digest}  {name}/{path}" for path, digest in digests.items()]
    PINS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--pin"]:
        pin()
    else:
        servers(), spark_jars()
