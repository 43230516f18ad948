"""Software bill of materials of a release, in CycloneDX: what is compiled in, what is required, hashes."""

from __future__ import annotations

import datetime
import hashlib
import re
import tomllib
import uuid
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement

from release.pythons import ROOT

_COMPILED_IN = (
    ("nanobind", "nanobind", "BSD-3-Clause"),
    ("robin-map", None, "MIT"),
    ("libc++", "ziglang", "Apache-2.0 WITH LLVM-exception"),
    ("libunwind", "ziglang", "Apache-2.0 WITH LLVM-exception"),
)
"""Name, the distribution with whose version it came, and licence. robin-map is a part of nanobind."""


def write_sbom(path: Path, files: Iterable[Path], seconds: int) -> None:
    """Write the bill of materials of these files, and check it against the schema. Nothing in it depends on the run."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    files = sorted(files)
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_URL, "".join(map(_sha256, files))))
    bom.metadata.timestamp = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    whole = Component(
        name=project["name"],
        version=project["version"],
        type=ComponentType.LIBRARY,
        bom_ref="fdcache",
        purl=PackageURL("pypi", name=project["name"], version=project["version"]),
        licenses=[DisjunctiveLicense(id=project["license"])],
    )
    bom.metadata.component = whole
    parts = [*map(_compiled, _COMPILED_IN), _chart_library(), *_required(project), *map(_file, files)]
    for part in parts:
        bom.components.add(part)
    bom.register_dependency(whole, parts)
    text = JsonV1Dot6(bom).output_as_string(indent=2) + "\n"
    if (problem := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is not None:
        raise SystemExit(f"the bill of materials does not follow its schema: {problem}")
    path.write_text(text)


def _compiled(part: tuple[str, str | None, str]) -> Component:
    name, distribution, terms = part
    number = version(distribution or "nanobind")
    return Component(
        name=name,
        version=number,
        type=ComponentType.LIBRARY,
        bom_ref=f"compiled-{name}",
        purl=PackageURL("pypi", name=distribution, version=number) if distribution else None,
        licenses=[LicenseExpression(terms)],
        properties=[Property(name="fdcache:use", value="compiled into the modules of a wheel")],
    )


def _chart_library() -> Component:
    """Return the chart library of the service's page, which a wheel has as it is published."""
    text = (ROOT / "fdcache" / "service" / "page" / "vendor" / "uPlot.js").read_text()
    found = re.match(r"/\*! https://\S+ \(v([\d.]+)\) \*/", text)
    if found is None:
        raise SystemExit("uPlot.js does not name its version in its first line")
    return Component(
        name="uPlot",
        version=found[1],
        type=ComponentType.LIBRARY,
        bom_ref="vendored-uPlot",
        purl=PackageURL("npm", name="uplot", version=found[1]),
        licenses=[LicenseExpression("MIT")],
        properties=[Property(name="fdcache:use", value="in a wheel, for the service's page")],
    )


def _required(project: dict[str, object]) -> list[Component]:
    listed = project["dependencies"]
    assert isinstance(listed, list)
    return [
        Component(
            name=need.name,
            type=ComponentType.LIBRARY,
            bom_ref=f"requires-{need.name}",
            scope=ComponentScope.REQUIRED,
            purl=PackageURL("pypi", name=need.name),
            properties=[Property(name="fdcache:versions", value=str(need.specifier))],
        )
        for need in map(Requirement, listed)
    ]


def _file(path: Path) -> Component:
    return Component(
        name=path.name,
        type=ComponentType.FILE,
        bom_ref=path.name,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=_sha256(path))],
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_checksums(path: Path, files: Iterable[Path]) -> None:
    """Write the SHA-256 of each file, as ``sha256sum --check`` reads it."""
    path.write_text("".join(f"{_sha256(each)}  {each.name}\n" for each in sorted(files)))
