"""A log line is one line, and no secret is in it."""

from __future__ import annotations

import json
import logging

import pytest
import structlog
from pydantic import SecretStr

from towline.bus.address import without_user
from towline.config import BusSettings, ServiceSettings
from towline.runtime.logging import configure_logging


@pytest.fixture(autouse=True)
def _restored() -> object:
    handlers = logging.getLogger().handlers[:]
    yield
    logging.getLogger().handlers[:] = handlers
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def _lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_an_event_is_one_json_line_with_its_context(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(ServiceSettings(), service="buffer", run="r")
    log = structlog.get_logger("x")
    log.info("batch", depth=3, text="two\nlines")
    log.debug("below the level")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("failed")
    logging.getLogger("library").warning("from %s", "elsewhere")
    logging.getLogger("library").info("not asked for")
    first, second, third = _lines(capsys)
    assert {name: first[name] for name in ("event", "service", "run", "depth", "text", "level")} == {
        "event": "batch", "service": "buffer", "run": "r", "depth": 3, "text": "two\nlines", "level": "info",
    }  # fmt: skip
    assert "ValueError" in str(second["exception"])
    assert (third["event"], third["level"], third["service"]) == ("from elsewhere", "warning", "buffer")


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_secrets_are_hidden_however_they_get_in(capsys: pytest.CaptureFixture[str], log_format: str) -> None:
    configure_logging(ServiceSettings.model_validate({"log_format": log_format}))
    secret = "hunter2hunter2"
    settings = BusSettings.model_validate({"url": f"nats://u:{secret}@h:1", "password": secret, "user": "u"})
    structlog.get_logger().info(
        "connect", password=secret, secret_key=secret, bus_token=secret, url=f"nats://u:{secret}@host:4222,nats://x:{secret}@b",
        wrapped=SecretStr(secret), nested={"headers": {"Authorization": f"Bearer {secret}"}}, rows=[{"access_key": secret}],
        settings=settings.model_dump(), tokens=12,
    )  # fmt: skip
    try:
        raise ConnectionError(f"can't reach nats://u:{secret}@host")
    except ConnectionError:
        structlog.get_logger().exception("failed")
    out = capsys.readouterr().out
    assert secret not in out
    assert "host:4222" in out
    assert "tokens" in out
    assert "12" in out


def test_a_url_keeps_its_host() -> None:
    assert without_user("nats://u:p@h:1,nats://h2:2 and http://k@x/y") == "nats://h:1,nats://h2:2 and http://x/y"
