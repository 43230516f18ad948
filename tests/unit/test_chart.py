"""The Helm chart, linted and rendered by Helm's own code: settings that hold, locked-down pods, shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fdcache import __version__
from fdcache.service.server.endpoints import endpoints
from fdcache.settings import VARIABLES
from fdcache.settings.kinds import parse_size
from tests.unit.test_serve_manifests import BOOKKEEPING, check_probe
from tests.unit.test_settings_docs import UID, settings_of

helm = pytest.importorskip(
    "helm_python.chart", reason="the chart is not tested: make test-chart installs Helm"
)
CHART = Path(__file__).parents[2] / "examples/helm/fdcache"
EVERYTHING = {
    "keys": {"secret": "keys"},
    "service": {
        "storage": {"enabled": True},
        "podMonitor": {"enabled": True},
        "settings": {"FDCACHE_TENANT_QUOTA": "0.25"},
        "tolerations": [{"operator": "Exists"}],
        "cpu": "4",
    },
    "engine": {"nodeSelector": {"gpu": "yes"}},
}
Manifests = dict[tuple[str, str], Any]


def rendered(values: dict[str, Any]) -> Manifests:
    """Return the manifests of a release named kv, by kind and name."""
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name="kv", namespace="serving")
    every = [
        each
        for name, text in files.items()
        if name.endswith(".yaml")
        for each in yaml.safe_load_all(text)
        if each
    ]
    found = {(each["kind"], each["metadata"]["name"]): each for each in every}
    assert len(found) == len(every)
    return found


def pod_of(manifest: Any) -> Any:
    return manifest["spec"]["template"]["spec"]


def test_it_has_no_finding_and_the_version_of_fdcache() -> None:
    for values in ({}, EVERYTHING):
        report = helm.lint(CHART, values, strict=True)
        assert report["errors"] == []
        assert [each for each in report["messages"] if each["severity"] > 1] == []
    with helm.Chart.load(CHART) as chart:
        assert chart.metadata["version"] == chart.metadata["appVersion"] == __version__


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["default", "everything"])
def test_the_service_has_settings_that_hold_on_every_node(values: dict[str, Any], tmp_path: Path) -> None:
    found = rendered(values)
    config, pod = found["ConfigMap", "kv-serve"]["data"], pod_of(found["DaemonSet", "kv-serve"])
    (container,) = pod["containers"]
    assert container["envFrom"] == [{"configMapRef": {"name": "kv-serve"}}]
    assert config.keys() <= VARIABLES.keys()
    limit = parse_size(container["resources"]["limits"]["memory"])
    keys = ["FD_API_KEY"] if "FDCACHE_SECRETS_DIR" in config else []
    settings = settings_of(config, keys, tmp_path, limit)
    assert settings.cache.host_memory + BOOKKEEPING < limit
    assert pod["terminationGracePeriodSeconds"] > settings.server.drain_timeout + 10
    assert endpoints(settings).address == found["ConfigMap", "kv-engine"]["data"]["FDCACHE_SERVER"]
    assert settings.server.runtime_dir is not None
    assert settings.server.runtime_dir.is_relative_to(settings.server.arena_dir)
    for probe, path in (("startup", "/readyz"), ("readiness", "/readyz"), ("liveness", "/healthz")):
        command = container[f"{probe}Probe"]["exec"]["command"]
        assert command[-1] == f"http://127.0.0.1:9470{path}"
        if not values:
            check_probe(command, settings, path)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts[config["FDCACHE_ARENA_DIR"]]["hostPath"]["path"] == config["FDCACHE_ARENA_DIR"]
    if values:
        assert mounts[config["FDCACHE_STORAGE_DIR"]]["hostPath"]["type"] == "Directory"
        assert mounts[config["FDCACHE_SECRETS_DIR"]]["secret"]["secretName"] == "keys"


def test_engines_map_the_memory_of_the_service() -> None:
    found = rendered({})
    service, engine = pod_of(found["DaemonSet", "kv-serve"]), pod_of(found["Deployment", "kv-engine"])
    (its,) = engine["containers"]
    memory = [volume for volume in service["volumes"] if volume["name"] == "node-memory"]
    assert [volume for volume in engine["volumes"] if volume["name"] == "node-memory"] == memory
    arena = found["ConfigMap", "kv-serve"]["data"]["FDCACHE_ARENA_DIR"]
    assert {"name": "node-memory", "mountPath": arena} in its["volumeMounts"]
    assert found["ConfigMap", "kv-engine"]["data"]["FDCACHE_ARENA_DIR"] == arena
    assert engine["securityContext"]["runAsUser"] == service["securityContext"]["runAsUser"] == UID


def test_every_pod_is_locked_down_and_selected_by_its_own_workload() -> None:
    found = rendered(EVERYTHING)
    workloads = [found["DaemonSet", "kv-serve"], found["Deployment", "kv-engine"]]
    for workload in workloads:
        pod, labels = pod_of(workload), workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
        names = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            locks = container["securityContext"]
            assert locks["readOnlyRootFilesystem"] is True
            assert locks["allowPrivilegeEscalation"] is False
            assert locks["capabilities"] == {"drop": ["ALL"]}
            assert {mount["name"] for mount in container["volumeMounts"]} == names
            assert "memory" in container["resources"]["limits"]
    selectors = [workload["spec"]["selector"]["matchLabels"] for workload in workloads]
    assert selectors[0] != selectors[1]
    assert found["PodMonitor", "kv-serve"]["spec"]["selector"]["matchLabels"] == selectors[0]


def test_without_engines_there_is_only_the_service() -> None:
    assert {kind for kind, _ in rendered({"engine": {"enabled": False}})} == {"ConfigMap", "DaemonSet"}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"service": {"hostMemory": "64"}}, "hostMemory"),
        ({"service": {"hostMemroy": "64GiB"}}, "hostMemroy"),
        ({"user": 0}, "user"),
        ({"service": {"podMonitor": {"enabled": True}}}, "keys.secret"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], told: str) -> None:
    with helm.Chart.load(CHART) as chart, pytest.raises(Exception, match=told):
        chart.validate_schema(values)
        chart.render(values, name="kv")
