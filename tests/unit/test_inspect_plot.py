"""Pictures of a service, and the share of prompt tokens that a client found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fdcache.service.wire.client_views import ClientFigures, ClientView
from fdcache.service.wire.views import NamedTenantView, NamespaceTierView, NamespaceView
from fdcache_cli.inspect_plot import plot_clients, plot_namespaces, plot_tenants, plot_tiers, plot_transfers

GIB = 2**30
CLIENTS = [
    ClientView(
        session="1",
        name=r"one $\frac$",
        stock_bytes=3 * GIB,
        figures={"counters": {"lookup_tokens": 200, "device_hit_tokens": 20, "host_hit_tokens": 90}},
    ),
    ClientView(session="2", name="two", stock_bytes=GIB, figures={"counters": {"lookup_tokens": "many"}}),
    ClientView(session="3", name="two"),
]
NAMESPACES = [
    NamespaceView("ab12", "llama", "1", 2, 16, GIB, tier=NamespaceTierView(ready=5, writing=1, free=3)),
    NamespaceView("cd34", "llama\x1b[2J", "1", 1, 16, GIB),
]
TENANTS = [
    NamedTenantView(tenant="acme", namespace="ab12", blocks=4, bytes=4 * GIB, quota=0.5, most_blocks=6),
    NamedTenantView(tenant="(none)", namespace="ab12", quota=0.5, most_blocks=9),
]


def texts(draw: Callable[[Any, Path], None], rows: Any, folder: Path) -> list[str]:
    """Return the labels of a picture, with the numbers at its axes."""
    matplotlib = pytest.importorskip("matplotlib")
    from xml.etree import ElementTree as ET

    picture = folder / "picture.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(rows, picture)
    namespace = "{http://www.w3.org/2000/svg}"
    return ["".join(each.itertext()).strip() for each in ET.parse(picture).getroot().iter(f"{namespace}text")]


def test_each_client_has_a_bar_whatever_its_name(tmp_path: Path) -> None:
    shown = texts(plot_clients, CLIENTS, tmp_path)
    assert [text for text in shown if text in (r"one $\frac$", "two")] == [r"one $\frac$", "two", "two"]
    assert {"device", "host", "storage", "GiB held to copy into", "3.0"} <= set(shown)


def test_namespaces_are_labelled_with_model_and_id(tmp_path: Path) -> None:
    shown = texts(plot_namespaces, NAMESPACES, tmp_path)
    assert {"ab12", "cd34", "llama", r"llama\x1b[2J", "ready", "writing", "free", "GiB of the arena"} <= set(
        shown
    )


def test_a_quota_is_marked_where_a_tenant_has_one(tmp_path: Path) -> None:
    assert "may have" in texts(plot_tenants, TENANTS, tmp_path)
    unlimited = [msgspec.structs.replace(each, quota=1.0) for each in TENANTS]
    assert "may have" not in texts(plot_tenants, unlimited, tmp_path)


@pytest.mark.parametrize("draw", [plot_tiers, plot_transfers, plot_clients, plot_namespaces, plot_tenants])
@pytest.mark.filterwarnings("error")
def test_no_rows_make_an_empty_picture(tmp_path: Path, draw: Callable[[Any, Path], None]) -> None:
    assert any(text for text in texts(draw, [], tmp_path))


@pytest.mark.parametrize(
    ("counters", "shares"),
    [
        (
            {"lookup_tokens": 200, "device_hit_tokens": 20, "host_hit_tokens": 90, "storage_hit_tokens": 5},
            {"device": 0.1, "host": 0.45, "storage": 0.025},
        ),
        ({"lookup_tokens": 8}, {"device": 0.0, "host": 0.0, "storage": 0.0}),
        ({"lookup_tokens": 10, "host_hit_tokens": 11}, {}),
        ({"lookup_tokens": 10, "host_hit_tokens": -1}, {}),
        ({"lookup_tokens": 0, "host_hit_tokens": 0}, {}),
        ({"lookup_tokens": True}, {}),
        ({"lookup_tokens": 10**400, "device_hit_tokens": 1}, {}),
        (None, {}),
    ],
)
def test_contradictory_client_figures_have_no_hit_shares(
    counters: dict[str, Any] | None, shares: dict[str, float]
) -> None:
    assert ClientFigures.of({"counters": counters}).hit_shares() == shares
