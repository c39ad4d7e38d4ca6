"""Metrics of a server in the form of Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counters, histograms and gauges of one server, in a separate Prometheus registry."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "txl_requests", "Number of requests that got a response.", ["status"], registry=registry
        )
        self.prompt_tokens = Counter("txl_prompt_tokens", "Number of tokens in prompts.", registry=registry)
        self.made_tokens = Counter("txl_completion_tokens", "Number of generated tokens.", registry=registry)
        self.first_token_s = Histogram(
            "txl_time_to_first_token_seconds",
            "Seconds from a request to its first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.per_token_s = Histogram(
            "txl_time_per_output_token_seconds",
            "Mean seconds per token of a text, after the first token.",
            buckets=_SECONDS,
            registry=registry,
        )

    def watch(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        """Add a gauge with this name and description (`meaning`).

        Each time that Prometheus reads the metrics, the function `value` is called and returns the gauge's current
        value.
        """
        Gauge(name, meaning, registry=self._registry).set_function(value)

    def page(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
