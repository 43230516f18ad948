"""The page of a service in a real browser: panels, deaths, restarts, ten thousand nodes, names, keys and keyboards."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from fdcache.hashing import hash_blocks, root_hash
from fdcache.settings.cache import CacheSettings, WritePolicy
from tests.browser import IMAGES, chromium, tab
from tests.service_engine import BLOCK, PROMPT, Engine, layout, ready_blocks
from tests.service_help import TIMEOUT, ServiceProcess, run, until

MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script>"
REPLAY = [
    sys.executable,
    "-m",
    "fdcache_cli.main",
    "replay",
    "--requests",
    "100000",
    "--device-blocks",
    "192",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class WebService(ServiceProcess):
    """A service with a page, at the same address after a restart."""

    def __init__(self, directory: Path, **settings: str) -> None:
        port = free_port()
        super().__init__(directory, FDCACHE_HTTP_ADDRESS=f"127.0.0.1:{port}", **settings)
        self.url = f"http://127.0.0.1:{port}/"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[WebService]:
    with WebService(tmp_path / "s", FDCACHE_HOST_MEMORY="64MiB") as own:
        own.start()
        yield own


def test_each_panel_shows_the_traffic_of_engines_that_die_and_of_a_service_that_restarts(
    tmp_path: Path, browser: Any
) -> None:
    settings = {
        "FDCACHE_HOST_MEMORY": "10MiB",
        "FDCACHE_STORAGE": "local",
        "FDCACHE_STORAGE_DIR": str(tmp_path / "storage"),
        "FDCACHE_STORAGE_SIZE": "24MiB",
        "FDCACHE_DISCARD": "0",
    }
    engines = {
        "FDCACHE_SERVER": f"ipc://{tmp_path / 's'}/fdcache.sock",
        "FDCACHE_WRITE_POLICY": "write_through",
        "FDCACHE_RPC_TIMEOUT": "10s",  # engines without a pause beside a browser, on two cores
    }
    with ExitStack() as stack:
        service = stack.enter_context(WebService(tmp_path / "s", **settings))
        service.start()
        running = [
            stack.enter_context(
                subprocess.Popen([*REPLAY, *more], env={**os.environ, **engines}, stdout=subprocess.DEVNULL)
            )
            for more in (
                ["--workload", "chat"],
                ["--workload", "agent", "--eviction", "learned", "--hints", "0.1"],
            )
        ]
        for engine in running:
            stack.callback(engine.kill)
        until(lambda: len(service.ask("clients")) == 2, "two engines have begun", 2 * TIMEOUT)
        light = stack.enter_context(tab(browser, service.url, color_scheme="light"))
        light.wait_for("document.querySelectorAll('#clients tbody tr').length === 2")
        for tier in ("host", "device"):
            light.wait_for(f"page.rows.last('{tier}_hit_tokens') > 0")
        for total in ("evicted_blocks", "storage_to_host_bytes", "missed_known"):
            light.wait_for(f"page.rows.last('{total}') > 0")
        light.wait_for(f"page.rows.length > {45 if IMAGES else 3}")
        light.wait_for("document.querySelector('#tree [aria-expanded=false]') !== null")
        light.page.click("#tree [aria-expanded=false]")
        for panel in ("hits", "bandwidth", "evictions", "queues"):
            until(
                lambda panel=panel: "\N{EN DASH}" not in light.text(panel),  # type: ignore[misc]
                f"each curve of {panel} has a value",
            )
        for panel, texts in {
            "tiers": ["ready", "free"],
            "misses": ["blocks"],
            "hints": ["given"],
            "storage": ["ready"],
            "settings": ["FDCACHE_STORAGE_SIZE"],
        }.items():
            for text in texts:
                light.wait_for_text(panel, text)
        light.page.fill("#settings-filter", "session_time")
        light.wait_for_text("settings", "FDCACHE_SESSION_TIMEOUT")
        light.page.fill("#settings-filter", "")
        hottest = light.page.locator("#tree [role=treeitem]").first.get_attribute("data-id").split()[1]
        light.page.fill("#explain-text", hottest)
        light.page.click("#explain-form button")
        light.wait_for_text("explained", hottest[:12])
        light.picture("page-light.png")
        light.page.click("#theme")
        light.wait_for("getComputedStyle(document.body).colorScheme === 'dark'")
        light.picture("page-dark.png")
        light.page.set_viewport_size({"width": 390, "height": 844})
        light.wait_for("document.documentElement.scrollWidth <= innerWidth")
        for panel in ("storage", "clients", "settings"):
            light.wait_for(
                "panel => (found => found.scrollWidth <= found.clientWidth)(document.getElementById(panel))",
                panel,
            )
        light.picture("page-narrow.png")

        running[0].kill()
        light.wait_for("document.querySelectorAll('#clients tbody tr').length === 1")
        light.wait_for_text("tiles", "1 died since the start")

        running[1].kill()
        running[1].wait()
        until(lambda: not service.ask("clients"), "no engine is left")
        light.wait_for_text("clients", "No engine is registered.")
        shown = httpx.get(f"{service.url}v1/page").json()
        light.wait_for(
            "missed => JSON.stringify(page.shown.missed) === JSON.stringify(missed)", shown["missed"]
        )
        started = light.page.evaluate("page.shown.started")
        service.kill()
        light.wait_for_text("link", "reconnecting")
        service.start()
        light.wait_for("started => page.shown.started > started && page.shown.state === 'ready'", started)
        light.wait_for_text("link", "live")
        assert light.page.evaluate("page.rows.columns.time[0] >= page.shown.started - 1")


def test_ten_thousand_nodes_open_by_keyboard(service: WebService, browser: Any) -> None:
    engine = Engine(service.address, device_blocks=256)
    for start in range(0, 510_000, 1000):
        engine.await_stock(21)
        engine.serve([7] * BLOCK + list(range(start, start + 20 * BLOCK + 1)))
    until(lambda: ready_blocks(service) >= 10_000, "ten thousand blocks are stored")
    with tab(browser, service.url) as shown:
        shown.wait_for("page.tree.count > 0")
        shown.page.select_option("#tree-limit", "10000")
        shown.wait_for("page.tree.count >= 10000")
        root = shown.page.locator("#tree [role=treeitem]").first
        root.focus()
        assert root.get_attribute("aria-expanded") == "false"
        shown.page.keyboard.press("ArrowRight")
        shown.wait_for("document.querySelectorAll('#tree [role=treeitem]').length === 52")
        for key in ("ArrowRight", "End", "Enter"):
            shown.page.keyboard.press(key)
        shown.wait_for("document.querySelectorAll('#tree [role=treeitem]').length === 102")
        shown.page.keyboard.press("Home")
        shown.page.keyboard.press("ArrowLeft")
        shown.wait_for("document.querySelectorAll('#tree [role=treeitem]').length === 1")
        assert shown.page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "false"
    engine.close()


def test_names_with_markup_are_text(tmp_path: Path, browser: Any) -> None:
    quotas = f"{MARKUP}=0.5"
    with WebService(tmp_path / "s", FDCACHE_TENANT_QUOTAS=quotas) as service:
        service.start()
        engine = Engine(service.address, layout(model=MARKUP))
        engine.serve(PROMPT, tenant=MARKUP)
        until(lambda: ready_blocks(service) == 10, "the blocks are stored")
        with tab(browser, service.url) as shown:
            shown.wait_for_text("namespaces", MARKUP)
            cells = shown.page.locator("#namespaces td").all_inner_texts()
            assert MARKUP in cells
            assert shown.page.evaluate("document.querySelectorAll('img, main script').length") == 0
            shown.page.fill("#explain-text", ", ".join(map(str, [*PROMPT[:24], *range(900, 917)])))
            shown.page.fill("#explain-tenant", MARKUP)
            shown.page.click("#explain-form button")
            shown.wait_for_text("explained", "6 of 10 blocks can be reused.")
            assert "not stored" in shown.text("explained")
        engine.close()


def test_blocks_on_a_device_alone_are_shown_as_there(tmp_path: Path, browser: Any) -> None:
    with WebService(tmp_path / "s", FDCACHE_KV_EVENTS="tcp://127.0.0.1:*") as service:
        service.start()
        engine = Engine(service.address)
        engine.serve(PROMPT)
        hashes = hash_blocks(PROMPT, BLOCK, parent=root_hash(engine.layout.fingerprint))

        def is_told() -> bool:
            found = service.ask("block", hash=hashes[-1].tobytes().hex())
            return any(each["devices"] for each in found)

        until(is_told, "the service knows what is on the device")
        service.ask("reset", tier="host", in_flight="keep")
        with tab(browser, service.url) as shown:
            shown.wait_for("document.querySelectorAll('#explain-namespace option').length === 1")
            shown.page.fill("#explain-text", ", ".join(map(str, PROMPT)))
            shown.page.click("#explain-form button")
            shown.wait_for_text(
                "explained",
                "10 of 10 blocks can be reused by an engine that has them on its device, 0 by others.",
            )
            assert "of 1 engine; left the host: reset" in shown.text("explained")
            shown.page.fill("#explain-text", hashes[-1].tobytes().hex())
            shown.page.click("#explain-form button")
            shown.wait_for_text("explained", "Blocks with this hash")
            assert shown.page.locator("#explained .tag").all_inner_texts() == ["device"]
        engine.close()


def test_adapter_and_lookahead_of_a_prompt_are_taken(service: WebService, browser: Any) -> None:
    settings = CacheSettings(
        server=service.address,
        device_blocks=32,
        write_policy=WritePolicy.WRITE_THROUGH,
        rpc_timeout=TIMEOUT,
        lookahead_tokens=1,
    )
    engine = Engine(service.address, settings=settings)
    engine.serve(PROMPT, adapter_id="support")
    until(lambda: ready_blocks(service) == 10, "the blocks are stored")
    with tab(browser, service.url, viewport={"width": 360, "height": 800}) as shown:
        shown.wait_for("document.querySelectorAll('#explain-namespace option').length === 1")
        shown.page.fill("#explain-text", ", ".join(map(str, PROMPT)))
        shown.page.click("#explain-form button")
        shown.wait_for_text("explained", "0 of 10 blocks can be reused.")
        shown.page.focus("#explain-tenant")
        for typed in ("support", "65"):
            shown.page.keyboard.press("Tab")
            shown.page.keyboard.type(typed)
        shown.page.keyboard.press("Enter")
        shown.wait_for_text("explained", "Lookahead: give a whole number from 0 to 64")
        shown.page.fill("#explain-lookahead", "1")
        shown.page.keyboard.press("Enter")
        shown.wait_for_text("explained", "All 10 blocks are there.")
        assert shown.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    engine.close()


def test_a_key_is_asked_for_and_never_shown(tmp_path: Path, browser: Any) -> None:
    key = "a-key-that-nobody-sees"
    with WebService(tmp_path / "s", FD_API_KEY=key) as service:
        service.start()
        assert httpx.get(f"{service.url}v1/page/events").status_code == 401
        with tab(browser, service.url) as shown:
            shown.wait_for("document.getElementById('key').open")
            shown.page.fill("#key-text", "a-key-in-€")
            shown.page.keyboard.press("Enter")
            shown.wait_for_text("key-refused", "This key has a character that a request cannot carry")
            shown.page.keyboard.type(key)
            shown.page.keyboard.press("Enter")
            shown.wait_for_text("state", "ready")
            shown.page.evaluate("sessionStorage.setItem('fdcache-key', 'kept-by-an-older-page-€')")
            shown.page.reload()
            shown.wait_for("document.getElementById('key').open")
            shown.page.fill("#key-text", key)
            shown.page.keyboard.press("Enter")
            shown.wait_for_text("state", "ready")
            shown.page.fill("#settings-filter", "FD_API_KEY")
            shown.wait_for_text("settings", "FD_API_KEY")
            assert key not in shown.page.content()
            assert key not in shown.page.evaluate("JSON.stringify(page.config) + location.href")
            # A request without the key is refused, which the browser writes to the console.
            shown.complaints[:] = [each for each in shown.complaints if "401" not in each]


def test_the_page_of_a_replay_shows_its_report(tmp_path: Path, browser: Any) -> None:
    file = tmp_path / "replay.html"
    small = ("--device-blocks", 256, "--host-memory", "8MiB", "--storage", tmp_path / "storage")
    done = run("replay", "--workload", "agent", "--requests", 150, *small, "--json", "--page", file)
    report = json.loads(done.stdout)
    with tab(browser, file.as_uri()) as shown:
        shown.wait_for_text("state", "ended")
        assert f"{100 * report['hit_rate']:.1f} %" in shown.text("tiles")
        assert shown.page.evaluate("page.rows.last('prompt_tokens')") == report["prompt_tokens"]
        assert {"Device", "Host", "Storage"} <= set(shown.text("tiers").split())
        shown.wait_for("document.querySelector('#tree [role=treeitem]') !== null")
        hottest = shown.page.locator("#tree [role=treeitem]").first.get_attribute("data-id").split()[1]
        shown.page.fill("#explain-text", hottest[:8])
        shown.page.click("#explain-form button")
        shown.wait_for_text("explained", hottest[:12])


def test_the_page_is_one_document_with_a_strict_policy_and_one_update_a_second(service: WebService) -> None:
    page = httpx.get(service.url)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    assert httpx.get(f"{service.url}page/../page.html").status_code == 404
    moments = []
    with httpx.stream("GET", f"{service.url}v1/page/events", timeout=30) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                moments.append(httpx.Response(200, text=line[6:]).json()["time"])
            if len(moments) == 4:
                break
    assert all(later - sooner > 0.99 for sooner, later in pairwise(moments))


def test_hashes_of_a_prompt_are_explained(service: WebService) -> None:
    engine = Engine(service.address)
    engine.serve(PROMPT)
    until(lambda: ready_blocks(service) == 10, "the blocks are stored")
    hashes = hash_blocks(PROMPT, BLOCK, parent=root_hash(engine.layout.fingerprint))
    prompts = [{"tokens": PROMPT}, {"hashes": [row.tobytes().hex() for row in hashes]}]
    answers = [httpx.post(f"{service.url}v1/explain", json=each).json() for each in prompts]
    assert [[block["tier"] for block in each["blocks"]] for each in answers] == [["host"] * 10] * 2
    engine.close()
