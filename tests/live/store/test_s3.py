"""The S3 store against a real server whose connections fail, and its one-line refusals."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from support.garbage import left_for_the_collector
from towline.config import StoreSettings
from towline.errors import FullError, MissingError, TowlineError, UnavailableError, UsageError
from towline.store.log import Log
from towline.store.objects import ObjectStore, open_store, settle

from . import logs
from .proxy import Act, S3Proxy, s3_proxy


@pytest.fixture(scope="module")
def proxy(s3_settings: StoreSettings) -> Iterator[S3Proxy]:
    with s3_proxy(s3_settings.endpoint) as proxy:
        yield proxy


@pytest.fixture
def flaky(proxy: S3Proxy, s3_settings: StoreSettings) -> ObjectStore:
    proxy.decide, proxy.change_status = lambda method, path: "pass", {}
    proxy.requests.clear()
    return open_store(s3_settings.model_copy(update={"endpoint": proxy.endpoint, "timeout_seconds": 5.0}))


def first(proxy: S3Proxy, method: str, act: Act, times: int = 1) -> None:
    """`act` on the first `times` requests of this method."""
    left = [act] * times
    proxy.decide = lambda m, path: left.pop() if m == method and left else "pass"


def test_a_conditional_put_whose_reply_is_lost_is_left_in_doubt_and_settled_by_reading(
    proxy: S3Proxy, flaky: ObjectStore, run_name: str
) -> None:
    first(proxy, "PUT", "forward-and-drop")
    with pytest.raises(UnavailableError) as raised:
        flaky.create(f"{run_name}/k", b"mine")
    assert raised.value.code == "reply_lost"
    assert [method for method, _ in proxy.requests].count("PUT") == 1
    assert settle(flaky, f"{run_name}/k", b"mine") == b"mine"


@pytest.mark.parametrize("act", ["forward-and-drop", "drop"])
def test_an_entry_whose_reply_was_lost_stands_once(proxy: S3Proxy, flaky: ObjectStore, run_name: str, act: Act) -> None:
    log = Log(flaky, run_name)
    first(proxy, "PUT", act)
    assert log.append(logs.base(write_id="mine")).write_id == "mine"
    assert [e.write_id for e in Log(flaky, run_name).refresh()] == ["mine"]


def test_a_conflict_of_conditional_requests_is_repeated(proxy: S3Proxy, flaky: ObjectStore, run_name: str) -> None:
    first(proxy, "PUT", (409, "ConditionalRequestConflict"), times=3)
    assert flaky.create(f"{run_name}/k", b"x")
    assert [method for method, _ in proxy.requests].count("PUT") == 4


def test_a_conflict_that_does_not_end_is_given_up(proxy: S3Proxy, s3_settings: StoreSettings, run_name: str) -> None:
    store = open_store(s3_settings.model_copy(update={"endpoint": proxy.endpoint, "timeout_seconds": 0.5}))
    first(proxy, "PUT", (409, "ConditionalRequestConflict"), times=1000)
    with pytest.raises(UnavailableError, match="ConditionalRequestConflict"):
        store.create(f"{run_name}/k", b"x")


@pytest.mark.parametrize("act", ["drop", "cut", (503, "SlowDown"), (500, "InternalError")])
def test_a_read_that_fails_is_repeated(proxy: S3Proxy, flaky: ObjectStore, run_name: str, act: Act) -> None:
    data = os.urandom(3_000_000)
    flaky.put(f"{run_name}/k", data)
    first(proxy, "GET", act, times=2)
    assert flaky.get(f"{run_name}/k") == data


def test_a_stream_that_is_cut_goes_on_where_it_was(proxy: S3Proxy, flaky: ObjectStore, run_name: str) -> None:
    data = os.urandom(5_000_000)
    flaky.put(f"{run_name}/k", data)
    first(proxy, "GET", "cut", times=2)
    assert b"".join(flaky.stream(f"{run_name}/k")) == data


def test_a_stream_never_mixes_two_objects(proxy: S3Proxy, flaky: ObjectStore, run_name: str) -> None:
    flaky.put(f"{run_name}/k", bytes(5_000_000))
    first(proxy, "GET", "cut")
    chunks = flaky.stream(f"{run_name}/k")
    assert next(chunks) == bytes(1 << 20)
    flaky.put(f"{run_name}/k", b"\1" * 5_000_000)
    with pytest.raises(UnavailableError, match="read it again"):
        list(chunks)


@pytest.mark.parametrize("act", ["drop", "forward-and-drop", (503, "SlowDown")])
def test_puts_deletes_stats_and_listings_are_repeated(
    proxy: S3Proxy, flaky: ObjectStore, run_name: str, act: Act, tmp_path: Path
) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"file")
    first(proxy, "PUT", act)
    flaky.put(f"{run_name}/k", b"x")
    first(proxy, "PUT", act)
    flaky.put(f"{run_name}/f", file)
    first(proxy, "GET", act)
    assert [(item.key, item.size) for item in flaky.list(f"{run_name}/")] == [(f"{run_name}/f", 4), (f"{run_name}/k", 1)]
    first(proxy, "HEAD", act)
    found = flaky.stat(f"{run_name}/k")
    assert found is not None
    first(proxy, "DELETE", act)
    flaky.delete(f"{run_name}/k")
    assert flaky.stat(f"{run_name}/k") is None


def test_a_full_store_says_so_at_once(proxy: S3Proxy, flaky: ObjectStore, run_name: str) -> None:
    first(proxy, "PUT", (507, "XMinioStorageFull"))
    with pytest.raises(FullError, match="no room"):
        flaky.put(f"{run_name}/k", b"x")
    assert len(proxy.requests) == 1


def test_large_objects_go_in_parts_and_come_back_whole(
    s3_settings: StoreSettings, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("towline.store.s3.PART_BYTES", 5 << 20)
    store, data = open_store(s3_settings), os.urandom(12_000_000)
    store.put(f"{run_name}/k", data)
    assert store.get(f"{run_name}/k") == data


def test_a_store_that_ignores_conditions_is_refused(proxy: S3Proxy, flaky: ObjectStore) -> None:
    flaky.check()
    proxy.change_status = {412: 200}
    with pytest.raises(UsageError, match="ignores If-None-Match"):
        flaky.check()


def _closed_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"url": "s3://no-such-bucket-here"}, "no bucket 'no-such-bucket-here'"),
        ({"access_key": "nobody"}, "keys"),
        ({"secret_key": SecretStr("wrong")}, "keys"),
        ({"endpoint": f"http://127.0.0.1:{_closed_port()}"}, "store.endpoint"),
    ],
)
def test_the_check_names_what_is_wrong_in_one_line(s3_settings: StoreSettings, change: dict[str, object], says: str) -> None:
    store = open_store(s3_settings.model_copy(update={"timeout_seconds": 1.0} | change))
    for writes in (True, False):
        with pytest.raises(TowlineError, match=says) as raised:
            store.check(writes=writes)
        assert "\n" not in raised.value.message
        assert "secret" not in raised.value.message.replace("secret_key", "")


def test_an_endpoint_that_is_no_s3_server_is_named(s3_settings: StoreSettings) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b"<html>not here</html>")

        do_PUT = do_GET

        def do_HEAD(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        store = open_store(s3_settings.model_copy(update={"endpoint": f"http://127.0.0.1:{server.server_port}"}))
        with pytest.raises(UsageError, match=r"doesn't answer like an S3 server; correct store\.endpoint"):
            store.check()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (StoreSettings(), "store.url is empty"),
        (StoreSettings(url="gs://bucket"), "store.url"),
        (StoreSettings(url="s3://"), "store.url"),
        (StoreSettings(url="file://host/path"), "store.url"),
        (
            StoreSettings(url="s3://bucket", endpoint="localhost:9000", access_key="a", secret_key=SecretStr("s")),
            "store.endpoint",
        ),
        (StoreSettings(url="s3://bucket", endpoint="http://h:1/x", access_key="a", secret_key=SecretStr("s")), "store.endpoint"),
        (StoreSettings(url="s3://bucket", endpoint="http://h:1"), "no S3 keys"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(settings: StoreSettings, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    with pytest.raises(UsageError, match=says):
        open_store(settings)


def test_keys_and_endpoint_come_from_the_usual_variables(s3_settings: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_settings.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_settings.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_settings.secret_key.get_secret_value())
    open_store(StoreSettings(url=s3_settings.url)).check()


def test_looking_for_what_is_not_there_leaves_nothing_for_the_collector(s3_settings: StoreSettings, run_name: str) -> None:
    """A LOG is looked at twice a second by each of its readers, mostly in vain."""
    store = open_store(s3_settings)
    with left_for_the_collector() as left:
        for _ in range(20):
            with pytest.raises(MissingError):
                store.get(f"{run_name}/nothing")
    assert len(left) < 20, Counter(left)
