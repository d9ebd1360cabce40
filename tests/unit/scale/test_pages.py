"""Metrics of replicas on one page."""

from __future__ import annotations

from collections import Counter

from prometheus_client import CollectorRegistry, Counter as Count, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from speculant.scale import joined

AWKWARD = 'a "b" engine="0" \\ \n{}'


def _page(value: float, label: str = "demo") -> str:
    registry = CollectorRegistry()
    Gauge("vllm:running", 'Says engine="0".', ["model", "engine"], registry=registry).labels(label, "0").set(value)
    Count("vllm:tokens", "Tokens.", ["engine", "model"], registry=registry).labels("0", label).inc(value)
    times = Histogram("vllm:seconds", "Seconds.", ["engine"], buckets=(1, 2), registry=registry)
    times.labels("0").observe(value)
    Gauge("process:memory", "Bytes.", registry=registry).set(value)
    return generate_latest(registry).decode()


def test_each_family_is_described_once() -> None:
    page = joined({"one": _page(1), "two": _page(2)})
    families = list(text_string_to_metric_families(page))
    assert len({family.name for family in families}) == len(families)
    starts = Counter(line.split(" ")[2] for line in page.splitlines() if line.startswith("# TYPE"))
    assert set(starts.values()) == {1}
    assert page.endswith("\n")


def test_samples_name_their_replica() -> None:
    families = {each.name: each for each in text_string_to_metric_families(joined({"one": _page(1), "two": _page(2)}))}
    running = {sample.labels["engine"]: sample.value for sample in families["vllm:running"].samples}
    assert running == {"one": 1.0, "two": 2.0}
    assert {sample.labels["engine"] for sample in families["vllm:seconds"].samples} == {"one", "two"}
    assert len(families["vllm:seconds"].samples) == 2 * len([*"123", "sum", "count"])
    (memory,) = families["process:memory"].samples
    assert memory.value == 1.0, "a sample without a replica is not that of the first page"


def test_labels_keep_their_values() -> None:
    families = {each.name: each for each in text_string_to_metric_families(joined({"one": _page(3, AWKWARD)}))}
    (sample,) = families["vllm:running"].samples
    assert sample.labels == {"model": AWKWARD, "engine": "one"}


def test_one_page_stays_as_it_is() -> None:
    page = _page(1)
    assert joined({"0": page}) == page
    assert joined({}) == ""
