"""The container files of the service agree with its settings, and with each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fdcache.service.server.endpoints import endpoints, parse_http
from fdcache.settings import Settings
from fdcache.settings.kinds import parse_duration, parse_size
from tests.unit.test_settings_docs import CONTAINER, UID, settings_of

BOOKKEEPING = 1 << 30  # what the process needs beside its arena, generously


def settings_in(environ: dict[str, str], folder: Path, limit: int) -> Settings:
    folder.mkdir(exist_ok=True)
    return settings_of(environ, [], folder, limit)


def check_probe(command: list[str], settings: Settings, path: str) -> None:
    http = parse_http(settings.server.http_address)
    assert http is not None
    assert command == ["python", "/opt/fdcache/probe.py", f"http://{http[0]}:{http[1]}{path}"]


@pytest.fixture
def manifests() -> dict[str, Any]:
    text = (CONTAINER / "kubernetes/serve.yaml").read_text()
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def test_the_daemon_set_serves_drains_and_is_locked_down(manifests: dict[str, Any], tmp_path: Path) -> None:
    config, pod = manifests["ConfigMap"], manifests["DaemonSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["fdcache", "serve"]
    assert container["envFrom"] == [{"configMapRef": {"name": config["metadata"]["name"]}}]
    limit = parse_size(container["resources"]["limits"]["memory"])
    settings = settings_in(config["data"], tmp_path, limit)
    assert settings.cache.host_memory + BOOKKEEPING < limit
    assert pod["terminationGracePeriodSeconds"] > settings.server.drain_timeout + 10
    check_probe(container["readinessProbe"]["exec"]["command"], settings, "/readyz")
    check_probe(container["startupProbe"]["exec"]["command"], settings, "/readyz")
    check_probe(container["livenessProbe"]["exec"]["command"], settings, "/healthz")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts[str(settings.server.arena_dir)]["hostPath"]["path"] == "/dev/shm"
    assert settings.server.runtime_dir is not None
    assert settings.server.runtime_dir.is_relative_to(settings.server.arena_dir)
    assert endpoints(settings).address == f"ipc://{settings.server.runtime_dir}/fdcache.sock"
    assert pod["securityContext"]["runAsUser"] == UID
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_the_compose_file_gives_service_and_engine_the_same_memory(tmp_path: Path) -> None:
    compose = yaml.safe_load((CONTAINER / "compose.serve.yaml").read_text())
    serve, engine = compose["services"]["serve"], compose["services"]["engine"]
    limit = parse_size(serve["mem_limit"].replace("g", "GiB"))
    settings = settings_in(serve["environment"], tmp_path, limit)
    assert serve["command"] == ["fdcache", "serve"]
    assert engine["environment"]["FDCACHE_SERVER"] == endpoints(settings).address
    assert engine["depends_on"]["serve"]["condition"] == "service_healthy"
    assert serve["volumes"] == engine["volumes"] == ["node:/node"]
    options = dict(pair.split("=") for pair in compose["volumes"]["node"]["driver_opts"]["o"].split(","))
    assert settings.cache.host_memory < parse_size(options["size"].replace("g", "GiB")) < limit
    assert options["uid"] == serve["user"] == str(UID)
    assert parse_duration(serve["stop_grace_period"]) > settings.server.drain_timeout + 10
    check_probe(serve["healthcheck"]["test"][1:], settings, "/readyz")
    base = yaml.safe_load((CONTAINER / "compose.yaml").read_text())
    assert base["services"]["engine"]["image"] == serve["image"]


def test_the_guide_names_every_container_file() -> None:
    text = (CONTAINER.parents[1] / "docs/configuration.md").read_text()
    for path in CONTAINER.rglob("*.yaml"):
        assert re.search(rf"\({re.escape('../' + str(path.relative_to(CONTAINER.parents[1])))}\)", text), path
