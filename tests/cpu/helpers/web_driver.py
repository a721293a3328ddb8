"""A real browser without a screen that clicks and types: ChromeDriver, by the W3C's WebDriver over HTTP."""

from __future__ import annotations

import base64
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from headless import FLAGS, browser

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the standard's own key
SHOWN = "return [location.href.replace(/\\/$/, ''), document.readyState]"
PATIENCE_SECONDS = 60.0
STEADY = tuple(flag for flag in FLAGS if not flag.startswith("--virtual-time"))


class Page:
    def __init__(self, session: httpx2.Client) -> None:
        self._session = session

    def open(self, url: str) -> None:
        """Go to a page, and wait until the browser shows it.

        A new browser may still be loading its own first page: then the command returns when that one has loaded, or that one
        replaces the page.
        """
        end = time.monotonic() + PATIENCE_SECONDS
        self._ask("POST", "url", {"url": url})
        while (state := self.run(SHOWN)) != [url.rstrip("/"), "complete"]:
            assert time.monotonic() < end, f"{url} is not shown after {PATIENCE_SECONDS:.0f} s: {state}"
            time.sleep(0.1)
            if state[1] == "complete":
                self._ask("POST", "url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        return self._ask("POST", "execute/sync", {"script": script, "args": list(arguments)})

    def type(self, selector: str, text: str) -> None:
        self._ask("POST", f"element/{self._find(selector)}/value", {"text": text})

    def click(self, selector: str) -> None:
        self._ask("POST", f"element/{self._find(selector)}/click", {})

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def resize(self, width: int, height: int) -> None:
        self._ask("POST", "window/rect", {"width": width, "height": height})

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("GET", "screenshot")))

    def complaints(self) -> list[str]:
        """Of the page's scripts, and what it could not load."""
        return [str(line["message"]) for line in self._ask("POST", "se/log", {"type": "browser"})]

    def _find(self, selector: str) -> str:
        return str(self._ask("POST", "element", {"using": "css selector", "value": selector})[ELEMENT])

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._session.request(method, path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]


@contextmanager
def driven(folder: Path) -> Iterator[Page]:
    """``folder``: for the browser's profile. Skips where there is no browser, or nothing to drive it."""
    binary, driver = browser(), shutil.which("chromedriver")
    if driver is None:
        pytest.skip("no chromedriver on this machine, which drives the browser")
    process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        started = next(line for line in process.stdout if "started successfully on port" in line)
        url = f"http://127.0.0.1:{int(started.rsplit(maxsplit=1)[1].rstrip('.'))}"
        chrome = {"binary": binary, "args": [*STEADY, f"--user-data-dir={folder}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
        made = httpx2.post(f"{url}/session", json={"capabilities": {"alwaysMatch": wanted}}, timeout=60).json()["value"]
        address = f"{url}/session/{made['sessionId']}"
        try:
            with httpx2.Client(base_url=f"{address}/", timeout=60) as session:
                yield Page(session)
        finally:
            closed = httpx2.delete(address, timeout=60)  # without this the browser outlives its driver
        assert closed.status_code == 200, closed.text
    finally:
        process.terminate()
        process.wait(timeout=30)


def main() -> None:
    """``web_driver.py URL PICTURE [WIDTH HEIGHT]``: what a page looks like."""
    url, picture, *size = sys.argv[1:]
    with driven(Path(picture).with_suffix(".profile")) as page:
        page.resize(*map(int, size or (1280, 800)))
        page.open(url)
        time.sleep(1.0)
        page.picture(Path(picture))


if __name__ == "__main__":
    main()
