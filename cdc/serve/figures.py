"""The figures of `cdc serve` for Prometheus: those of the pipeline as `cdc run` has them, and how old
they are.
"""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cdc.observe.pipeline_metrics import build_info, metrics_of
from cdc.serve.dashboard import Dashboard


class _Figures(Collector):
    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard

    def collect(self) -> Iterator[Metric]:
        """Yield every metric. Called by each scrape."""
        yield build_info()
        sample = self._dashboard.status.sample
        failing = self._dashboard.status.trouble is not None
        yield GaugeMetricFamily("cdc_look_up", "1 while looks succeed.", value=float(not failing))
        if sample:
            age_s = time.time() - sample.taken_at
            yield GaugeMetricFamily("cdc_look_age_seconds", "Since the last look.", value=age_s)
            yield from metrics_of(sample.value)


def metrics_text(dashboard: Dashboard) -> bytes:
    """Return all figures in the text format of Prometheus."""
    registry = CollectorRegistry()
    registry.register(_Figures(dashboard))
    return generate_latest(registry)
