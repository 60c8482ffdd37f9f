"""Elasticsearch as a company runs it: several nodes, https with its own authority, users with few rights."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import trustme

from cdc.compose import artifacts, host, process
from cdc.compose.secured import elasticsearch_rights, hash_for_elasticsearch
from cdc.compose.servers import Elasticsearch, ServerDirs
from tests.support.wait import wait_until

START_S = 180
SETTINGS = """
xpack.security.enabled: true
xpack.security.http.ssl: {enabled: true, key: tls.key, certificate: tls.pem}
xpack.security.transport.ssl:
  {enabled: true, verification_mode: certificate, key: tls.key, certificate: tls.pem, certificate_authorities: [ca.pem]}
resource.reload.interval.high: 1s
"""
NAMES = ("es-1", "es-2", "es-3")
"""Each has data and may be the master."""
USER = "shop"
PASSWORD = "let-me-in-4711"
ADMIN = "admin"
PREFIX = "t_"
"""What the pipelines of tests begin with."""
RIGHTS: dict[str, Any] = elasticsearch_rights([f"{PREFIX}*"])
"""The rights of USER."""


class Node:
    """One node of a cluster, a process that may be killed and started again."""

    def __init__(self, name: str, folder: Path, ports: Mapping[str, int]) -> None:
        self.server = Elasticsearch()
        self.name = name
        self.url = f"https://127.0.0.1:{ports[name]}"
        own = {"elasticsearch": ports[name], "elasticsearch-transport": ports[_transport(name)]}
        self.dirs = ServerDirs(
            folder / name / "elasticsearch", own, artifacts.servers(), host.java()
        )
        self._process: process.Process | None = None

    def start(self) -> None:
        environment = self.server.environment(self.dirs)
        command = self.server.command(self.dirs)
        self._process = process.spawn(
            command,
            home=self.dirs.home,
            log=self.dirs.log,
            env=environment,
            user=self.server.user(),
        )

    def kill(self) -> None:
        if self._process:
            process.kill(self._process)


class SecuredIndex:
    """A cluster. ca: the file of its authority. nodes: at the addresses `urls`, in this order."""

    def __init__(self, folder: Path, ca: trustme.CA, names: Sequence[str]) -> None:
        self.authority = ca
        self.ca = folder / "ca.pem"
        ca.cert_pem.write_to_path(str(self.ca))
        ports = host.choose_ports([*names, *map(_transport, names)])
        self.nodes = [Node(name, folder, ports) for name in names]
        self.urls = tuple(node.url for node in self.nodes)
        seeds = [f"127.0.0.1:{ports[_transport(name)]}" for name in names]
        masters = f"cluster.initial_master_nodes: {json.dumps(names)}"
        for node in self.nodes:
            self._prepare(node, f"discovery.seed_hosts: {json.dumps(seeds)}\n{masters}\n{SETTINGS}")
        self.set_users(PASSWORD)
        self.set_rights(RIGHTS)

    def _prepare(self, node: Node, settings: str) -> None:
        node.server.prepare(node.dirs)
        conf = node.dirs.conf
        path = conf / "elasticsearch.yml"
        lines = path.read_text().splitlines()
        kept = [line for line in lines if not line.startswith(("discovery.", "node.", "xpack."))]
        path.write_text("\n".join([*kept, f"node.name: {node.name}", settings]))
        (conf / "users_roles").write_text(f"superuser:{ADMIN}\n{USER}:{USER}\n")
        self.authority.cert_pem.write_to_path(str(conf / "ca.pem"))
        own = self.authority.issue_cert("127.0.0.1", "localhost")
        own.private_key_pem.write_to_path(str(conf / "tls.key"))
        own.cert_chain_pems[0].write_to_path(str(conf / "tls.pem"))
        host.change_owner(node.dirs.home, node.server.user())

    def set_users(self, password: str) -> None:
        """Give USER this password. Nodes that run know it within seconds."""
        users = {ADMIN: PASSWORD, USER: password}
        lines = [f"{name}:{hash_for_elasticsearch(text)}\n" for name, text in users.items()]
        for node in self.nodes:
            _replace(node, "users", "".join(lines))

    def change_password(self, password: str) -> None:
        """Give USER another password, and wait until every node goes by it."""
        self.set_users(password)

        def is_known() -> bool:
            return all(
                httpx.get(
                    f"{url}/_security/_authenticate",
                    auth=(USER, password),
                    verify=False,
                    timeout=60,
                ).is_success
                for url in self.urls
            )

        wait_until(is_known, 60, "every node to know the password")

    def set_rights(self, rights: Mapping[str, Any]) -> None:
        """Give USER these rights. Nodes that run know them within seconds."""
        for node in self.nodes:
            _replace(node, "roles.yml", json.dumps({USER: rights}))

    def wait_for_rights(self) -> None:
        """Wait until every node gives USER its rights: a request may be carried out on several."""
        asked = {"cluster": RIGHTS["cluster"], "index": RIGHTS["indices"]}

        def are_given(url: str) -> bool:
            answer = httpx.post(
                f"{url}/_security/user/_has_privileges",
                json=asked,
                auth=(USER, PASSWORD),
                verify=False,
                timeout=60,
            )
            return answer.is_success and bool(answer.json()["has_all_requested"])

        wait_until(lambda: all(map(are_given, self.urls)), 60, "every node to know the rights")

    def client(self, node: int = 0) -> httpx.Client:
        """Return a client of a node that may do everything."""
        return httpx.Client(
            base_url=self.urls[node],
            auth=(ADMIN, PASSWORD),
            verify=False,
            timeout=60,
        )

    def master(self) -> Node:
        """Return the node that the cluster has elected."""
        with self.client() as client:
            name = client.get("/_cat/master?h=node").raise_for_status().text.strip()
        return next(node for node in self.nodes if node.name == name)

    def wait_for_nodes(self, node: int = 0, count: int = 0) -> None:
        """Wait until a node is in a cluster of so many, all of them if 0, and every index is whole."""
        query = {"wait_for_nodes": str(count or len(self.nodes)), "wait_for_status": "green"}

        def is_whole() -> bool:
            with self.client(node) as client:
                try:
                    answer = client.get("/_cluster/health", params={**query, "timeout": "1s"})
                except httpx.HTTPError:
                    return False
            return answer.status_code == httpx.codes.OK

        wait_until(is_whole, START_S, "the cluster to be whole")


def _replace(node: Node, name: str, text: str) -> None:
    """Replace a file of settings at once: a node that reads half of it knows no user or no right."""
    fresh = node.dirs.conf / f"{name}.new"
    fresh.write_text(text)
    host.change_owner(fresh, node.server.user())
    fresh.rename(node.dirs.conf / name)


def _transport(name: str) -> str:
    return f"{name}-transport"


@contextmanager
def secured_index() -> Iterator[SecuredIndex]:
    """A new cluster of three nodes, whose users and files are its own."""
    folder = Path(tempfile.mkdtemp(prefix="cdc-index-"))
    # Root's servers run as another user.
    folder.chmod(0o755)
    index = SecuredIndex(folder, trustme.CA(), NAMES)
    try:
        for node in index.nodes:
            node.start()
        index.wait_for_nodes()
        yield index
    finally:
        for node in index.nodes:
            node.kill()
        shutil.rmtree(folder, ignore_errors=True)
