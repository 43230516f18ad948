"""Chromium for the tests of the page: Debian's, driven by Playwright; what is missing skips them with one line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.service_help import TIMEOUT, until

IMAGES = os.environ.get("PAGE_IMAGES")
"""Folder for the pictures of the guides; they are made anew with PAGE_IMAGES=docs/images."""


_PAUSE = 0.1
"""Seconds between two looks at a page, each of which three processes take part in."""


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser without a window; skips the tests where there is none."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="the page is not tested: pip install playwright"
    )
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("the page is not tested: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


class Tab:
    """A page of a browser. What it writes to the console, and what it asks of other hosts, is kept."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.complaints: list[str] = []
        self.context = browser.new_context(**({"viewport": {"width": 1440, "height": 1000}} | options))
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * TIMEOUT)
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.on("request", lambda request: self._check(request.url, url))
        self.page.goto(url)

    def _check(self, asked: str, url: str) -> None:
        if not asked.startswith((url, "data:")):
            self.complaints.append(f"asks {asked}")

    def text(self, panel: str) -> str:
        """Return the text of a panel."""
        return str(self.page.inner_text(f"#{panel}"))

    def wait_for(self, expression: str, argument: Any = None) -> None:
        """Wait until JavaScript is true. Playwright's own wait is refused by the policy of the page."""
        until(lambda: self.page.evaluate(expression, argument), expression, pause=_PAUSE)

    def wait_for_text(self, panel: str, text: str) -> None:
        """Wait until a panel has a text."""
        self.wait_for("([id, text]) => document.getElementById(id).innerText.includes(text)", [panel, text])

    def picture(self, name: str) -> None:
        """Take a picture of the whole page, for the guides if they are to be made anew."""
        self.page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        self.page.screenshot(path=f"{IMAGES}/{name}" if IMAGES else None, full_page=True)

    def close(self) -> None:
        """Close the page."""
        self.context.close()


@contextmanager
def tab(browser: Any, url: str, **options: Any) -> Iterator[Tab]:
    """A page, which at its end has asked nobody else, and told the console of nothing but lost connections."""
    opened = Tab(browser, url, **options)
    try:
        yield opened
        assert [each for each in opened.complaints if "net::ERR_" not in each] == []
    finally:
        opened.close()
