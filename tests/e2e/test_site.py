"""The site in a browser, from files and without a network; `make site` builds it and runs this."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import chromium

SITE = Path(__file__).parents[2] / "build/site"

pytestmark = pytest.mark.skipif(not (SITE / "index.html").exists(), reason="there is no site here: make site")


def test_search_finds_a_page_and_nothing_is_asked_of_other_hosts() -> None:
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(120_000)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((SITE / "index.html").as_uri())
        page.locator(".md-search__button").first.click()
        page.keyboard.type("huge pages")
        page.get_by_text("huge pages").last.wait_for()
        page.locator("text=/^[0-9]+ results?$/").wait_for()
        page.keyboard.press("Control+A")
        page.keyboard.type("fdcache init")
        found = page.locator("a[href*='h=fdcache+init']").first
        found.wait_for()
        assert "Preparing a machine" in found.inner_text(), "a guide comes before what is only called alike"
        assert [url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))] == []


@pytest.mark.parametrize("width", [390, 1280])
def test_the_first_page_fits_its_window(width: int) -> None:
    with chromium() as browser:
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.set_default_timeout(120_000)
        page.goto((SITE / "index.html").as_uri())
        page.get_by_role("heading", name="Which engine do you have?").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
