"""A chromium without a screen, driven by its own driver; it tells what the page asked for and what it complained about."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

BINARY, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
WIDE, NARROW = (1360, 900), (390, 844)
PATIENCE_SECONDS = 30.0


def needed() -> None:
    """Skip, saying what is missing."""
    if not BINARY or not DRIVER:
        pytest.skip("no chromium and chromedriver here: apt-get install chromium chromium-driver")
    pytest.importorskip("selenium", reason="pip install 'towline[dev]'")


class Browser:
    """One tab. `requests` and `complaints` are emptied by reading them."""

    def __init__(self, folder: Path) -> None:
        from selenium.webdriver import Chrome
        from selenium.webdriver.chrome.options import Options
        from selenium.webdriver.chrome.service import Service

        options = Options()
        options.binary_location = BINARY or ""
        for flag in (
            "headless=new",
            "no-sandbox",
            "disable-gpu",
            "hide-scrollbars",
            "disable-dev-shm-usage",
            "disable-extensions",
        ):
            options.add_argument(f"--{flag}")
        options.add_argument(f"--user-data-dir={folder}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver: Any = Chrome(options=options, service=Service(DRIVER))
        self.driver.set_page_load_timeout(PATIENCE_SECONDS)
        self.driver.set_script_timeout(PATIENCE_SECONDS)
        self._events: list[dict[str, Any]] = []

    def close(self) -> None:
        self.driver.quit()

    def look(self, *, dark: bool, size: tuple[int, int] = WIDE) -> None:
        """As a system of that theme, in a window of that size, shows it."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == NARROW}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def open(self, url: str) -> None:
        self.driver.get(url)

    def reload(self) -> None:
        self.driver.refresh()

    def js(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def until(self, condition: str) -> Any:
        """The expression's value, once it's true; what stands on the page where it never is."""
        from selenium.common.exceptions import TimeoutException
        from selenium.webdriver.support.ui import WebDriverWait

        try:
            return WebDriverWait(self.driver, PATIENCE_SECONDS, 0.05).until(lambda _: self.js(f"return {condition}"))
        except TimeoutException:
            text = self.js("return document.body.innerText")
            raise AssertionError(f"never: {condition}; the page says:\n{text}\n{self.complaints()}") from None

    def text(self, selector: str = "#page") -> str:
        return str(self.js("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def count(self, selector: str) -> int:
        return int(self.js("return document.querySelectorAll(arguments[0]).length", selector))

    def press(self, *keys: str) -> None:
        """To whatever has the focus. Names are those of selenium's Keys."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        for key in keys:
            ActionChains(self.driver).send_keys(getattr(Keys, key, key)).perform()

    def picture(self, path: Path, height: int | None = None) -> None:
        """The window, or the page down to `height`."""
        width = self.js("return innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height or self.js("return innerHeight"), "scale": 1}
        shot = self.driver.execute_cdp_cmd(
            "Page.captureScreenshot", {"format": "png", "clip": clip, "captureBeyondViewport": height is not None}
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Of the console, since the last call: errors and warnings, refusals of the policy among them."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def hosts(self) -> set[str]:
        """Every host:port that the tab asked anything of since the last call."""
        found = set()
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = urlsplit(message["params"]["request"]["url"])
                if url.scheme in ("http", "https", "ws", "wss"):  # not the browser's own pages
                    found.add(url.netloc)
        return found


def browsing(folder: Path) -> Iterator[Browser]:
    """For a fixture."""
    needed()
    browser = Browser(folder)
    try:
        yield browser
    finally:
        browser.close()
