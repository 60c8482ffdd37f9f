"""The figures of `cdc serve` for Prometheus: those of the pipeline as `cdc run` has them."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cdc.observe.pipeline_metrics import build_info, metrics_of_looks
from cdc.serve.dashboard import Dashboard


class _Figures(Collector):
    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard

    def collect(self) -> Iterator[Metric]:
        """Yield every metric. Called by each scrape."""
        yield build_info()
        yield from metrics_of_looks(self._dashboard.status)


def metrics_text(dashboard: Dashboard) -> bytes:
    """Return all figures in the text format of Prometheus."""
    registry = CollectorRegistry()
    registry.register(_Figures(dashboard))
    return generate_latest(registry)
