"""Metrics declared as a table: a class body has one line for each, with its name, its help text and its labels.

Each instance of the class makes them in a registry of its own, so two services in one process do not add up.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

M = TypeVar("M")

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, which Prometheus's text format knows nothing of


class Total(Collector):
    """A counter whose values are kept elsewhere, and copied here when it is scraped."""

    def __init__(self, name: str, help_text: str, labels: Sequence[str], *, registry: CollectorRegistry) -> None:
        self._name = name
        self._help_text = help_text
        self._labels = labels
        self._values: Mapping[tuple[str, ...], float] = {} if labels else {(): 0.0}
        registry.register(self)

    def set(self, value: float) -> None:
        self._values = {(): value}

    def set_each(self, values: Mapping[tuple[str, ...], float]) -> None:
        """Copy the value of each combination of labels."""
        self._values = values

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._help_text, labels=self._labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        yield family


class Declared(Generic[M]):
    """A metric that is made for each instance of its class."""

    def __init__(
        self, kind: Callable[..., M], name: str, help_text: str, labels: Sequence[str], **options: Any
    ) -> None:
        self.name = name
        self.labels = tuple(labels)
        self._kind = kind
        self._help_text = help_text
        self._options = options

    def make(self, registry: CollectorRegistry) -> M:
        return self._kind(self.name, self._help_text, self.labels, registry=registry, **self._options)

    def __get__(self, instance: object, owner: type) -> M:
        raise AttributeError("a metric belongs to an instance")


class DeclaredMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        for name, declared in vars(type(self)).items():
            if isinstance(declared, Declared):
                setattr(self, name, declared.make(registry))


def declared_labels() -> dict[str, tuple[str, ...]]:
    """Return the labels of every declared metric by its name, for the reference of metrics."""
    declarations = (each for cls in DeclaredMetrics.__subclasses__() for each in vars(cls).values())
    return {each.name: each.labels for each in declarations if isinstance(each, Declared)}


def counter(name: str, help_text: str, *labels: str) -> Declared[Counter]:
    return Declared(Counter, name, help_text, labels)


def gauge(name: str, help_text: str, *labels: str) -> Declared[Gauge]:
    return Declared(Gauge, name, help_text, labels)


def total(name: str, help_text: str, *labels: str) -> Declared[Total]:
    return Declared(Total, name, help_text, labels)


def histogram(name: str, help_text: str, *labels: str, buckets: Sequence[float]) -> Declared[Histogram]:
    return Declared(Histogram, name, help_text, labels, buckets=buckets)


def states(name: str, help_text: str, values: Sequence[str]) -> Declared[Enum]:
    return Declared(Enum, name, help_text, (), states=list(values))
