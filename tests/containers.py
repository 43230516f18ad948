"""Commands of the compose files and Kubernetes manifests, run as processes instead of containers.

Command, environment and mounts are those of the files. A volume is a folder; two containers see the same one where the
files say so, and nothing of each other elsewhere.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.unit.test_settings_docs import CONTAINER, ROOT, environment_of_image


@dataclass(frozen=True)
class Container:
    """``mounts``: the folder here for each path in the container."""

    command: list[str]
    environment: dict[str, str]
    mounts: dict[str, Path] = field(default_factory=dict)

    def here(self, text: str) -> str:
        """A text with the container's paths as they are on this machine."""
        for path in sorted(self.mounts, key=len, reverse=True):
            changed = re.sub(rf"^(ipc://)?{re.escape(path)}(?=/|$)", rf"\g<1>{self.mounts[path]}", text)
            if changed != text:
                return changed
        return text

    def process(self, others: Mapping[str, str], *, writes: bool = True) -> dict[str, str]:
        """The environment of its process; ``others`` stand above the file's.

        Every folder that it names, where it ``writes``, is one that is mounted: the rest of the container cannot be
        written.
        """
        own = {name: self.here(text) for name, text in self.environment.items()}
        unmounted = {
            name for name, text in self.environment.items() if text.startswith("/") and text == own[name]
        }
        assert not writes or unmounted <= {"FDCACHE_SECRETS_DIR"}, f"{unmounted} cannot be written"
        for name in unmounted:
            own[name] = ""  # the image's own, with nothing in it
        return {**own, **others, "PATH": os.environ["PATH"]}

    @property
    def fdcache(self) -> list[str]:
        """Its command, which is one of fdcache's."""
        assert self.command[0] == "fdcache"
        return [sys.executable, "-m", "fdcache_cli.main", *self.command[1:]]


class Folders:
    """One folder for each volume, by name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, name: str) -> Path:
        folder = self._directory / re.sub(r"\W", "-", name).strip("-")
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder


def compose(directory: Path, *names: str) -> dict[str, Container]:
    """The services of compose files, of which later ones add to the earlier."""
    services: dict[str, dict[str, Any]] = {}
    for name in names:
        for service, told in yaml.safe_load((CONTAINER / name).read_text())["services"].items():
            known = services.setdefault(service, {})
            known["environment"] = {**known.get("environment", {}), **told.get("environment", {})}
            known["volumes"] = [*known.get("volumes", []), *told.get("volumes", [])]
            known |= {key: value for key, value in told.items() if key not in ("environment", "volumes")}
    return {name: _service(name, told, Folders(directory)) for name, told in services.items()}


def _service(name: str, told: dict[str, Any], folder: Folders) -> Container:
    environment = environment_of_image()
    if "env_file" in told:
        lines = (CONTAINER / told["env_file"]).read_text().splitlines()
        environment |= dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    environment |= {key: str(value) for key, value in told["environment"].items()}
    mounts = {
        path.partition(":")[0]: folder(f"{name}{path.partition(':')[0]}") for path in told.get("tmpfs", [])
    }
    mounts["/run/secrets"] = folder(f"{name}-secrets")
    for secret in told.get("secrets", []):
        _write_key(mounts["/run/secrets"] / secret)
    for volume in told["volumes"]:
        source, path = re.sub(r"\$\{.*?\}", "host", volume).split(":")[:2]
        mounts[path] = folder(f"volume-{source}")
    return Container(told["command"], environment, mounts)


def kubernetes(directory: Path) -> dict[str, Container]:
    """The containers that ``kubectl apply -k`` starts, by name."""
    folder = CONTAINER / "kubernetes"
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    objects = {
        (each["kind"], each["metadata"]["name"]): each
        for name in kustomization["resources"]
        for each in yaml.safe_load_all((folder / name).read_text())
    }
    for patch in kustomization["patches"]:
        change = yaml.safe_load((folder / patch["path"]).read_text())
        key = (change["kind"], change["metadata"]["name"])
        objects[key] = _merge(objects[key], change)
    maps = {name: each["data"] for (kind, name), each in objects.items() if kind == "ConfigMap"}
    found = {}
    for (kind, name), each in objects.items():
        if kind == "ConfigMap":
            continue
        pod = each["spec"]["template"]["spec"]
        volumes = {volume["name"]: _volume(name, volume, Folders(directory)) for volume in pod["volumes"]}
        for told in (*pod.get("initContainers", []), *pod["containers"]):
            environment = environment_of_image()
            for source in told["envFrom"]:
                environment |= maps[source["configMapRef"]["name"]]
            for entry in told.get("env", []):
                reference = entry["valueFrom"]["configMapKeyRef"]
                environment[entry["name"]] = maps[reference["name"]][reference["key"]]
            mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in told["volumeMounts"]}
            found[told["name"]] = Container(told["command"], environment, mounts)
    return found


def _volume(pod: str, volume: dict[str, Any], folder: Folders) -> Path:
    """A path of the node is the same for all pods, everything else is the pod's own."""
    node = volume.get("hostPath")
    made = folder(f"node{node['path']}" if node else f"{pod}-{volume['name']}")
    for item in volume.get("secret", {}).get("items", []):
        _write_key(made / item["path"])
    return made


def _merge(base: Any, change: Any) -> Any:
    """A strategic merge: dictionaries by key, of which null removes, and lists of named things by name."""
    if isinstance(base, dict) and isinstance(change, dict):
        merged = {key: value for key, value in base.items() if key not in change}
        merged |= {
            key: _merge(base[key], value) if key in base else value
            for key, value in change.items()
            if value is not None
        }
        return merged
    if isinstance(base, list) and isinstance(change, list) and all("name" in each for each in change):
        changes = {each["name"]: each for each in change}
        known = [_merge(each, changes.pop(each["name"], {})) for each in base]
        return [*known, *changes.values()]
    return change


__all__ = ["ROOT", "Container", "compose", "kubernetes"]


def _write_key(path: Path) -> None:
    path.write_text("a-key")
    path.chmod(0o440)
