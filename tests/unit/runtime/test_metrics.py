"""Metrics say what the figures say, under the catalogue's names, and the store's calls as they went."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from towline.config import StoreSettings
from towline.errors import FullError, MissingError, UnavailableError
from towline.runtime.metrics import Metrics
from towline.runtime.metrics_catalogue import Shown
from towline.runtime.metrics_common import MeteredStore
from towline.store.objects import ObjectStore, open_store


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What a scraper reads: (name, labels) -> value."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}


def test_figures_are_metrics_under_the_catalogues_names() -> None:
    figures: dict[str, Any] = {
        "admitted": 3, "dropped": {"stale": 2, "failed": 1, "note": "text"}, "open": None, "partials": {"written": 4},
        "evals": [[1]], "failed_versions": {"7": "why", "8": "why"}, "done": True,
    }  # fmt: skip
    metrics = Metrics("x")
    metrics.show_figures(
        lambda: figures,
        (Shown("admitted", "samples_admitted", "a", "counter"), Shown("dropped", "samples_dropped", "d", "counter", "reason"),
         Shown("open", "samples_open", "o"), Shown("partials.written", "partials_written", "p", "counter"),
         Shown("failed_versions", "versions_failed", "f"), Shown("done", "finished", "e"), Shown("gone", "gone", "g")),
    )  # fmt: skip
    found = {key: value for key, value in samples(metrics).items() if key[0].startswith("towline_")}
    assert found == {
        ("towline_x_samples_admitted_total", ()): 3, ("towline_x_samples_dropped_total", (("reason", "stale"),)): 2,
        ("towline_x_samples_dropped_total", (("reason", "failed"),)): 1, ("towline_x_partials_written_total", ()): 4,
        ("towline_x_versions_failed", ()): 2, ("towline_x_finished", ()): 1,
    }  # fmt: skip
    figures["admitted"] = 5
    assert samples(metrics)["towline_x_samples_admitted_total", ()] == 5


def test_a_histogram_of_counts_is_cumulative_and_sums_up() -> None:
    metrics = Metrics("x")
    metrics.show_histogram("staleness_depths", "s", lambda: {0: 5, 1: 3, 3: 2, 40: 1}, (0, 1, 2, 4))
    found = samples(metrics)
    buckets = [found["towline_x_staleness_depths_bucket", (("le", le),)] for le in ("0.0", "1.0", "2.0", "4.0", "+Inf")]
    assert buckets == [5, 8, 8, 10, 11]
    assert found["towline_x_staleness_depths_count", ()] == 11
    assert found["towline_x_staleness_depths_sum", ()] == 49


class Broken:
    """A store that is away in every way."""

    url = "broken://"

    def get(self, key: str) -> bytes:
        raise MissingError(key) if key == "none" else UnavailableError("away")

    def stream(self, key: str) -> Iterator[bytes]:
        yield b"a"
        raise UnavailableError("cut")

    def put(self, key: str, data: bytes | Path) -> None:
        raise FullError("full")


def test_the_stores_faults_are_counted_by_code_and_what_isnt_there_is_no_fault(tmp_path: Path) -> None:
    metrics, broken = Metrics("x"), MeteredStore(Broken())  # type: ignore[arg-type]
    broken.show(metrics)
    for call in (
        lambda: broken.get("none"),
        lambda: broken.get("k"),
        lambda: list(broken.stream("k")),
        lambda: broken.put("k", b""),
    ):
        with pytest.raises((MissingError, UnavailableError)):
            call()
    found = samples(metrics)
    errors = {labels: value for (name, labels), value in found.items() if name == "towline_x_store_errors_total"}
    code = UnavailableError("x").code
    assert errors == {
        (("code", code), ("operation", "get")): 1, (("code", code), ("operation", "stream")): 1,
        (("code", FullError("x").code), ("operation", "put")): 1,
    }  # fmt: skip
    assert found["towline_x_store_request_duration_seconds_count", (("operation", "get"),)] == 2


def test_a_metered_store_is_the_store(tmp_path: Path) -> None:
    plain = open_store(StoreSettings(url=tmp_path.as_uri()))
    store: ObjectStore = MeteredStore(plain)
    store.put("a/b", b"1")
    assert [store.create("a/c", b"2"), store.create("a/c", b"3")] == [True, False]
    assert (store.get("a/b"), b"".join(store.stream("a/c"))) == (b"1", b"2")
    assert sorted(info.key for info in store.list("a/")) == ["a/b", "a/c"]
    store.delete("a/b")
    assert store.stat("a/b") is None
    assert store.url == plain.url
    store.check()
