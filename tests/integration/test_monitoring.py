"""Grafana board and alert rules: every metric and label in them is one that a service has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from fdcache.service.server.http import make_app
from tests.service_engine import PROMPT, Engine
from tests.service_help import local_service, until

MONITORING = Path(__file__).parents[2] / "examples/monitoring"
BOARD = json.loads((MONITORING / "grafana.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
QUERIES = [
    *(target["expr"] for panel in BOARD["panels"] for target in panel["targets"]),
    *(rule["expr"] for rule in RULES),
]
_ADDED = {"job", "instance"}
"""Labels that Prometheus adds."""


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, set[str]]]:
    """The labels of each metric of a service with storage, an engine, a tenant and a hint."""
    directory = tmp_path_factory.mktemp("service")
    storage = {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_DIR": str(directory / "storage")}
    with local_service(directory, **storage, FDCACHE_STORAGE_SIZE="8MiB") as service:
        engine = Engine(service.address)
        engine.serve(PROMPT, tenant="a")
        until(
            lambda: (
                (found := service.ask("stats"))["namespaces"][0]["totals"]["traffic"]["copied"]
                and found["storage"]["blocks"]
            ),
            "copies are told and blocks are stored",
        )
        with TestClient(make_app(service.address, ())) as web:
            text = web.get("/metrics").text
        engine.close()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    yield found


@pytest.mark.parametrize("query", QUERIES)
def test_every_metric_and_label_is_one_that_a_service_has(query: str, labels: dict[str, set[str]]) -> None:
    names = set(re.findall(r"\bfdcache_\w+", query)) or {"up"}
    assert names <= {*labels, "up"}
    for name, selector in re.findall(r"\b(fdcache_\w+)\{([^}]*)\}", query):
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) <= labels[name] | _ADDED
    its = set().union(*(labels.get(name, set()) for name in names)) | _ADDED
    for grouped in re.findall(r"\b(?:by|ignoring)\s*\(([^)]*)\)", query):
        assert {each.strip() for each in grouped.split(",")} <= its


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_is_promql(query: str) -> None:
    promql_parser = pytest.importorskip(
        "promql_parser", reason="queries are not parsed: pip install promql-parser"
    )
    promql_parser.parse(query.replace("$__rate_interval", "1m"))
    with pytest.raises(ValueError, match=r"."):
        promql_parser.parse(f"sum by ({query}")


@pytest.mark.parametrize("panel", BOARD["panels"], ids=lambda panel: panel["title"])
def test_legends_name_labels_that_the_query_keeps(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert re.search(rf"by \([^)]*\b{label}\b", target["expr"])


def test_panels_have_numbers_and_places_of_their_own() -> None:
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len({*taken}) == len(taken)
    assert max(x for x, _ in taken) < 24


def test_alerts_say_what_happened_and_how_bad_it_is() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"]["summary"]


def test_prometheus_reads_configuration_rules_and_queries(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("Prometheus' own check is not made: apt-get install prometheus")
    queries = [query.replace("$__rate_interval", "1m") for query in QUERIES]
    rules = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(queries)]
    board = tmp_path / "board.yaml"
    board.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    for what, file in (("config", MONITORING / "prometheus.yaml"), ("rules", board)):
        done = subprocess.run(
            [promtool, "check", what, str(file)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
