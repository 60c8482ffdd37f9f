"""An OpenSearch, or an Elasticsearch 9, for the tests of the index: `python -m tests.support.other_index NAME`.

Prints its URL when it is ready, for `pytest tests/contract --index URL`, and runs until Ctrl-C or the end of its
standard input. Files come from Maven Central by Ivy, once per user. OpenSearch has no distribution there: its server is
put together from its modules, without those for security and scripts.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from cdc.compose import artifacts, host, process
from tests.support.wait import wait_until

OPENSEARCH = "2.19.6"
ELASTICSEARCH = "9.1.0"
START_S = 240
PLUGINS = {
    "transport-netty4-client": "org.opensearch.transport.Netty4Plugin",
    "analysis-common": "org.opensearch.analysis.common.CommonAnalysisPlugin",
}
SECURITY = """
grant codeBase "${codebase.netty-common}" {
  permission java.io.FilePermission "/proc/sys/net/core/somaxconn", "read";
  permission java.net.SocketPermission "*", "accept,connect";
  permission java.lang.RuntimePermission "*", "setContextClassLoader";
  permission java.lang.RuntimePermission "getClassLoader";
};
grant codeBase "${codebase.netty-transport}" {
  permission java.util.PropertyPermission "sun.nio.ch.bugLevel", "write";
};
"""
"""What OpenSearch's own distribution allows its HTTP server."""
MODULES = {
    "elasticsearch-9": {
        "server": [
            ("org.elasticsearch.distribution.integ-test-zip", "elasticsearch", ELASTICSEARCH, "zip"),
        ],
    },
    "opensearch": {
        "server": [
            ("org.opensearch", "opensearch", OPENSEARCH, "jar"),
            ("org.opensearch", "opensearch-plugin-classloader", OPENSEARCH, "jar"),
            ("org.apache.logging.log4j", "log4j-core", "2.25.4", "jar"),
        ],
        **{name: [("org.opensearch.plugin", name, OPENSEARCH, "jar")] for name in PLUGINS},
    },
}  # fmt: skip
"""By kind of server: the modules of each of its folders."""


def files(kind: str) -> Path:
    """Return the folder of a server's files, fetching them first when the cache lacks them."""
    version = ELASTICSEARCH if kind == "elasticsearch-9" else OPENSEARCH
    home = artifacts.cache_dir() / f"other-index-{kind}-{version}"
    artifacts.make_once(home, lambda work: _fetch(kind, work))
    return home


def _fetch(kind: str, work: Path) -> Path:
    folders = MODULES[kind]
    dependencies = "\n".join(
        f'<dependency conf="{folder}->default(runtime)" org="{org}" name="{name}" rev="{version}"'
        f' transitive="{str(ext == "jar").lower()}"><artifact name="{name}" type="{ext}" ext="{ext}"/></dependency>'
        if ext == "zip"
        else f'<dependency conf="{folder}->default(runtime)" org="{org}" name="{name}" rev="{version}"/>'
        for folder, modules in folders.items()
        for org, name, version, ext in modules
    )
    confs = "".join(f'<conf name="{folder}"/>' for folder in folders)
    ivy = work / "ivy.xml"
    ivy.write_text(
        '<ivy-module version="2.0"><info organisation="cdc" module="index"/>'
        f"<configurations>{confs}</configurations><dependencies>{dependencies}</dependencies></ivy-module>"
    )
    command = [
        *(host.java(), f"-Divy.default.ivy.user.dir={work / 'user'}", "-jar", artifacts.ivy_jar()),
        *("-ivy", ivy, "-cache", work / "ivy"),
        *("-retrieve", work / "lib/[conf]/[artifact](-[classifier])-[revision].[ext]"),
    ]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return work / "lib"


@contextmanager
def other_index(kind: str) -> Iterator[str]:
    """Run a server of one node; its URL."""
    folder = Path(tempfile.mkdtemp(prefix="cdc-other-index-"))
    folder.chmod(0o755)
    ports = host.choose_ports(["http", "transport"])
    for name in ("conf", "data", "log", "tmp"):
        (folder / name).mkdir()
    make = _opensearch if kind == "opensearch" else _elasticsearch
    command, environment, name = make(folder, files(kind))
    lines = [
        *("cluster.name: cdc", "node.name: cdc", "discovery.type: single-node"),
        *("network.host: 127.0.0.1", f"http.port: {ports['http']}"),
        *(f"transport.port: {ports['transport']}", f"path.data: {folder / 'data'}"),
        *(f"path.logs: {folder / 'log'}", "cluster.max_shards_per_node: 5000"),
        "cluster.routing.allocation.disk.threshold_enabled: false",
    ]
    if kind != "opensearch":
        lines.append("xpack.security.enabled: false")
    (folder / "conf" / name).write_text("\n".join(lines))
    user = host.unprivileged()
    host.change_owner(folder, user)
    environment |= {"PATH": os.environ["PATH"], "HOME": str(folder / "tmp")}
    log = folder / "server.log"
    server = process.spawn(command, home=folder, log=log, env=environment, user=user)
    url = f"http://127.0.0.1:{ports['http']}"

    def is_ready() -> bool:
        try:
            return httpx.get(f"{url}/_cluster/health", timeout=30).is_success
        except httpx.HTTPError:
            return False

    try:
        wait_until(is_ready, START_S, f"{kind} to start; its log is {log}")
        yield url
    finally:
        process.kill(server)
        shutil.rmtree(folder, ignore_errors=True)


def _opensearch(folder: Path, lib: Path) -> tuple[list[str | Path], dict[str, str], str]:
    shutil.copytree(lib / "server", folder / "lib")
    for module, plugin in PLUGINS.items():
        shutil.copytree(lib / module, folder / "modules" / module)
        descriptor = {
            **dict.fromkeys(("name", "description"), module),
            **dict.fromkeys(("version", "opensearch.version"), OPENSEARCH),
            "classname": plugin,
            "java.version": "11",
        }
        lines = [f"{name}={value}" for name, value in descriptor.items()]
        (folder / "modules" / module / "plugin-descriptor.properties").write_text("\n".join(lines))
    policy = folder / "modules" / "transport-netty4-client" / "plugin-security.policy"
    policy.write_text(SECURITY)
    (folder / "plugins").mkdir()
    (folder / "conf" / "log4j2.properties").write_text("rootLogger.level = warn\n")
    tmp = folder / "tmp"
    options = ["-Xms512m", "-Xmx512m", "-Djava.security.manager=allow", f"-Djava.io.tmpdir={tmp}"]
    options += [f"-Djna.tmpdir={tmp}", f"-Dopensearch.path.home={folder}"]
    options += [f"-Dopensearch.path.conf={folder / 'conf'}", "-Dopensearch.distribution.type=tar"]
    program = ["-cp", f"{folder / 'lib'}/*", "org.opensearch.bootstrap.OpenSearch"]
    return [host.java(), *options, *program], {}, "opensearch.yml"


def _elasticsearch(folder: Path, lib: Path) -> tuple[list[str | Path], dict[str, str], str]:
    """It takes Java 21 or later: `CDC_JAVA_21`, the home of one."""
    with zipfile.ZipFile(next((lib / "server").glob("*.zip"))) as bundle:
        bundle.extractall(folder)
        for entry in bundle.infolist():
            if mode := entry.external_attr >> 16:
                (folder / entry.filename).chmod(mode)
    home = folder / f"elasticsearch-{ELASTICSEARCH}"
    for name in ("jvm.options", "log4j2.properties"):
        shutil.copy(home / "config" / name, folder / "conf")
    environment = {
        "ES_PATH_CONF": str(folder / "conf"),
        "ES_JAVA_HOME": os.environ["CDC_JAVA_21"],
        "ES_JAVA_OPTS": "-Xms512m -Xmx512m",
        "ES_TMPDIR": str(folder / "tmp"),
    }
    return [home / "bin" / "elasticsearch"], environment, "elasticsearch.yml"


if __name__ == "__main__":
    with other_index(sys.argv[1]) as address:
        print(address, flush=True)
        with suppress(KeyboardInterrupt):
            sys.stdin.read()
