"""The web view in a real browser, of a gateway that is a process: each page, by keys, by day and by night, wide and narrow. What
trajectories say is hostile here; nothing of it may run, and nothing may leave the host."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from live.gateway.test_kills import ARGUMENTS, TOML
from live.worker.world import World
from support import browser as chromium
from support.browser import NARROW, WIDE, Browser
from support.planted_view import IMAGE, OUTSIDE, SCRIPT, WORDS, PlantedRun
from support.waiting import until
from towline.bus.client import Bus
from towline.bus.topology import STATUS
from towline.config import BusSettings
from towline.contract.groups import group_token

TOKEN = "a-token-for-the-view-of-this-run"
PAGES = ("overview", "versions", "replicas", "trajectories", "trajectory/2.3", "dead")
NAMELESS = """return [...document.querySelectorAll('button, a, input, select, [role=img]')].filter((one) => one.checkVisibility()
  && !(one.textContent || one.ariaLabel || one.title || one.labels?.length)).map((one) => one.outerHTML)"""
READY = "document.querySelector('#run-name').textContent && document.querySelector('#banner').hidden"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    yield from chromium.browsing(tmp_path_factory.mktemp("chromium"))


@pytest.fixture
async def url(bus_settings: BusSettings, tmp_path: Path, run_name: str, tab: Browser) -> AsyncIterator[str]:
    """Of a gateway process with one tenant, over a planted run."""
    bus = await Bus.connect(bus_settings, run=run_name, client_name="test")
    await bus.ensure()
    planted = PlantedRun(World(bus, tmp_path, run_name))
    await planted.plant()
    config = tmp_path / "run.toml"
    config.write_text(
        TOML.format(
            run=run_name, folder=tmp_path / "runs", url=bus_settings.url, budget=bus_settings.budget_bytes,
            store=(tmp_path / "store").as_uri(), engine="synthetic", arguments=ARGUMENTS["synthetic"],
        ) + f'[gateway.tenants.me]\ntoken = "{TOKEN}"\n'
    )  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "towline.gateway", "--config", str(config), "--replica", "g",
        stdout=(tmp_path / "gateway.log").open("wb"), stderr=asyncio.subprocess.STDOUT, env=dict(os.environ),
    )  # fmt: skip
    found: list[str] = []

    async def up() -> bool:
        assert process.returncode is None, (tmp_path / "gateway.log").read_text()
        value = await bus.kv(STATUS).get("gateway.g")
        if value:
            found.append(msgspec.json.decode(value)["figures"]["api_url"])
        return bool(found)

    beating = asyncio.create_task(_beat(planted))
    try:
        await until(up, 60.0)
        yield found[0]
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        process.terminate()
        await process.wait()
        await bus.close()


async def _beat(planted: PlantedRun) -> None:
    while True:
        await planted.beat()
        await asyncio.sleep(3.0)


async def test_a_browser_shows_the_run_and_runs_nothing_of_it(url: str, tab: Browser):
    await asyncio.to_thread(_visit, url, tab)
    async with httpx.AsyncClient(base_url=url) as client:
        refused = await client.get("/ui/api/overview")
    assert refused.status_code == 401


def _visit(url: str, tab: Browser) -> None:
    tab.look(dark=False)
    tab.open(f"{url}/")
    _sign_in(tab)
    for dark, size in ((False, WIDE), (True, NARROW)):
        tab.look(dark=dark, size=size)
        for page in PAGES:
            _one_page(tab, url, page, dark=dark)
    tab.look(dark=False)
    _hostile_text(tab, url)
    _lists_by_key(tab, url)
    _tokens_by_key(tab, url)
    _theme_and_help(tab, url)
    assert tab.hosts() == {urlsplit(url).netloc}, "something was asked of another host"
    asked_for = (
        "401 (Unauthorized)",
        "reward=lots&limit=50 - Failed to load resource: the server responded with a status of 400",
    )
    assert [one for one in tab.complaints() if not any(text in one for text in asked_for)] == []


def _sign_in(tab: Browser) -> None:
    tab.until("document.querySelector('#sign-in').open")
    tab.press("not the token", "ENTER")
    tab.until(
        "document.querySelector('#sign-in').open && document.querySelector('#sign-in-problem').textContent.includes('token')"
    )
    tab.press(TOKEN, "ENTER")
    tab.until(READY)
    assert tab.js("return Object.values(localStorage).join() + location.href").count(TOKEN) == 0, "the token was kept for good"


def _one_page(tab: Browser, url: str, page: str, *, dark: bool) -> None:
    tab.open(f"{url}/ui/#/{page}")
    tab.until(f"{READY} && document.querySelector('#page h1') && !document.querySelector('#page').innerText.endsWith('…')")
    tab.until("document.querySelectorAll('#page .card').length > 0")
    assert tab.js("return document.documentElement.scrollWidth <= innerWidth"), f"{page} is wider than the window"
    assert tab.count("#nav a[aria-current=page]") == 1
    background = tab.js("return getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in background.removeprefix("rgb(").removesuffix(")").split(",")) / 3
    assert (brightness < 80) == dark, f"{page}: {background}"
    assert tab.js(NAMELESS) == [], f"{page}: a control has no name"


def _hostile_text(tab: Browser, url: str) -> None:
    for page in ("trajectories", "trajectory/2.3", f"trajectory/{group_token(OUTSIDE)}.0", "dead"):
        tab.open(f"{url}/ui/#/{page}")
        shown = {"dead": "window.hacked=3"}.get(page, WORDS[SCRIPT])
        tab.until(f"document.querySelector('#page').innerText.includes({shown!r})")
        assert tab.js("return window.hacked ?? null") is None
        assert tab.count("#page script, #page img, #page b script, #page i[onerror]") == 0
    tab.open(f"{url}/ui/#/trajectory/2.3")
    tab.until("document.querySelectorAll('.tok').length === 13")
    assert WORDS[IMAGE] in tab.text(".tokens-card")
    assert "<u>exact</u>" in tab.text()
    assert (
        tab.js("return [...document.querySelectorAll('.tok')].map(one => getComputedStyle(one).unicodeBidi)") == ["isolate"] * 13
    )
    assert "retract" in tab.text(".tokens-card .cut")
    assert "trained into version" in tab.text(".fate")


def _lists_by_key(tab: Browser, url: str) -> None:
    tab.open(f"{url}/ui/#/trajectories")
    tab.reload()  # what was opened before isn't selected then
    tab.until("document.querySelectorAll('.list tbody tr').length === 14")
    tab.press("j", "j", "k", "j")
    second = tab.js("return document.querySelectorAll('.list tbody tr')[1].dataset.key")
    assert tab.js("return document.activeElement.dataset.key") == second
    assert tab.js("return document.querySelector('[aria-selected=true]').dataset.key") == second
    tab.press("ENTER")
    tab.until(f"location.hash === '#/trajectory/{second}'")
    tab.press("j", "j", "k")
    third = tab.js("return location.hash.split('/')[2]")
    assert third != second
    tab.press("u")
    tab.until(f"location.hash === '#/trajectories' && document.activeElement.dataset.key === '{third}'")
    tab.press("/", "2", "ENTER")
    tab.until("document.querySelectorAll('.list tbody tr').length === 4")
    tab.press("ESCAPE")
    tab.open(f"{url}/ui/#/trajectories?state=dropped&reward=0.5:")
    tab.until("document.querySelectorAll('.list tbody tr').length === 2 && document.querySelectorAll('.pill.bad').length === 2")
    tab.open(f"{url}/ui/#/trajectories?reward=lots")
    tab.until("document.querySelector('#banner').textContent.includes('use a number or FROM:TO')")
    for key, page in zip("12345", ("overview", "versions", "replicas", "trajectories", "dead"), strict=True):
        tab.press(key)
        tab.until(f"location.hash === '#/{page}' && {READY}")
    tab.until("document.querySelectorAll('.list tbody tr').length === 1")
    tab.press("j", "ENTER")
    tab.until("document.querySelector('pre.content')?.textContent.includes('ff0077686174')")


def _tokens_by_key(tab: Browser, url: str) -> None:
    tab.open(f"{url}/ui/#/trajectory/2.3")
    tab.until("document.querySelectorAll('.tok').length === 13")
    tab.press("ARROW_RIGHT", "ARROW_RIGHT")
    tab.until("document.querySelector('.inspector').innerText.includes('Token 4')")
    assert str(IMAGE) in tab.text(".inspector code")
    assert tab.js("return document.activeElement.dataset.place") == "4"
    tab.press("c")
    tab.until("document.querySelector('.by-logprob .p5')")
    colours = tab.js(
        "return ['.p0', '.p5'].map(name => getComputedStyle(document.querySelector('.by-logprob ' + name)).backgroundColor)"
    )
    assert colours[0] != colours[1]
    tab.press("i")
    tab.until("document.querySelector('.tokens.ids')")
    assert [str(SCRIPT), str(IMAGE)] == tab.js(
        "return [3, 4].map(at => document.querySelector(`[data-place='${at}'] small`).textContent)"
    )
    tab.press("]")
    assert tab.js("return location.hash") == "#/trajectory/2.3", "there is no later sample in the group"
    tab.press("[")
    tab.until("location.hash === '#/trajectory/2.2'")


def _theme_and_help(tab: Browser, url: str) -> None:
    def background() -> str:
        return str(tab.js("return getComputedStyle(document.body).backgroundColor"))

    tab.press("1")
    tab.until("location.hash === '#/overview'")
    day = background()
    tab.press("t", "t")
    assert tab.js("return document.documentElement.dataset.theme") == "dark"
    night = background()
    assert night != day
    tab.open(f"{url}/ui/")
    tab.until(READY)
    assert background() == night, "the choice doesn't hold over a reload"
    tab.press("t")
    assert background() == day
    tab.press("?")
    tab.until("document.querySelector('#keys').open && document.querySelector('#keys').innerText.includes('token by token')")
    tab.press("ESCAPE")
    tab.until("!document.querySelector('#keys').open")
    tab.press("TAB")
    assert (
        tab.js("return document.activeElement.matches(':focus-visible') && getComputedStyle(document.activeElement).outlineStyle")
        == "solid"
    )
