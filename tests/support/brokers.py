"""Three brokers of Kafka that are their own controllers, any of which may be away, and a worker of Connect."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

from confluent_kafka.admin import AdminClient

from cdc.compose import artifacts, host, process
from cdc.compose.secured import add
from cdc.compose.servers import Connect, JavaServer, Kafka, ServerDirs, last_lines
from tests.support.wait import wait_until

START_S = 120
CLUSTER = "MkU3OEVBNTcwNTJENDM2Qg"
COPIES = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    # A broker that was killed is missed after that time; the default is 9 s.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
}


class Broker(Kafka):
    """One of several. number: from 1."""

    heap = ("-Xmx256m",)

    def __init__(self, number: int, voters: str) -> None:
        self.own = {
            **COPIES,
            "node.id": str(number),
            "controller.quorum.voters": voters,
            "controller.quorum.bootstrap.servers": "",
        }

    def create(self, dirs: ServerDirs) -> None:
        properties = dirs.conf / "server.properties"
        add(properties, self.own)
        if not (dirs.data / "meta.properties").exists():
            tool = (*self.jvm(dirs), "kafka.tools.StorageTool", "format", "--ignore-formatted")
            self.run(dirs, *tool, "-t", CLUSTER, "-c", properties)


class Worker(Connect):
    """A worker whose own topics have three copies."""

    heap = ("-Xmx384m", "-Xmn192m")

    def __init__(self, brokers: str) -> None:
        topics = ("config", "offset", "status")
        copies = {f"{topic}.storage.replication.factor": "3" for topic in topics}
        self.own = {"bootstrap.servers": brokers, **copies}

    def create(self, dirs: ServerDirs) -> None:
        add(dirs.conf / "server.properties", self.own)


class Running:
    """A server that may be killed and started again, on its old ports and data."""

    def __init__(self, server: JavaServer, folder: Path, ports: Mapping[str, int]) -> None:
        self.ports = ports
        self.address = f"127.0.0.1:{ports[server.name]}"
        self._server = server
        self._dirs = ServerDirs(folder, ports, artifacts.servers(), host.java())

    def start(self) -> None:
        server = self._server
        server.prepare(self._dirs)
        self._process = process.spawn(
            server.command(self._dirs),
            home=self._dirs.home,
            log=self._dirs.log,
            env=server.environment(self._dirs),
            user=None,
        )

    def wait(self) -> None:
        wait_until(
            lambda: self._server.ready(self.ports), START_S, lambda: last_lines(self._dirs.log)
        )

    def kill(self) -> None:
        process.kill(self._process)


class Brokers:
    """addresses: of all of them, as the pipeline file has them. connect: the worker's address."""

    def __init__(self, folder: Path) -> None:
        names = [f"{name}-{number}" for number in (1, 2, 3) for name in Kafka().port_names]
        ports = host.choose_ports([*names, Connect.name])
        own = [
            {name: ports[f"{name}-{number}"] for name in Kafka().port_names} for number in (1, 2, 3)
        ]
        voters = ",".join(
            f"{number}@127.0.0.1:{of_broker['kafka-controller']}"
            for number, of_broker in enumerate(own, 1)
        )
        self.brokers = [
            Running(Broker(number, voters), folder / f"kafka-{number}", of_broker)
            for number, of_broker in enumerate(own, 1)
        ]
        self.addresses = ",".join(broker.address for broker in self.brokers)
        worker = {**own[0], Connect.name: ports[Connect.name]}
        self.worker = Running(Worker(self.addresses), folder / Connect.name, worker)
        self.connect = f"http://{self.worker.address}"
        self._admin = AdminClient({"bootstrap.servers": self.addresses, "log_level": 0})

    def start(self) -> None:
        for broker in self.brokers:
            broker.start()
        for broker in self.brokers:
            broker.wait()
        self.worker.start()
        self.worker.wait()

    def leader(self, topic: str) -> Running:
        """The broker that leads the first partition of a topic."""
        described = self._admin.list_topics(topic, timeout=30).topics[topic]
        return self.brokers[described.partitions[0].leader - 1]

    def copies(self) -> set[int]:
        """How many copies of partitions are up to date, over all topics."""
        topics = self._admin.list_topics(timeout=30).topics.values()
        return {len(partition.isrs) for topic in topics for partition in topic.partitions.values()}

    def stop(self) -> None:
        for server in (self.worker, *self.brokers):
            server.kill()


@contextmanager
def three_brokers() -> Iterator[Brokers]:
    folder = Path(tempfile.mkdtemp(prefix="cdc-brokers-"))
    brokers = Brokers(folder)
    try:
        brokers.start()
        yield brokers
    finally:
        brokers.stop()
        rmtree(folder, ignore_errors=True)
