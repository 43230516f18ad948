"""Names that look like settings but are none, and what was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator

from fdcache.settings.problems import Problem, warning
from fdcache.settings.sources import FILE_SUFFIX, PREFIXES, Layer

_LINK_NAME = re.compile(r".+_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://\S+:\d+")


def is_service_link(name: str, value: object) -> bool:
    """Whether Kubernetes puts such a variable into the pods of a namespace for a Service of some name."""
    if _LINK_NAME.fullmatch(name):
        return True
    return name.endswith("_PORT") and is_link_address(value)


def is_link_address(value: object) -> bool:
    """Whether a value is what Kubernetes writes into a service link, such as ``tcp://10.0.0.1:80``."""
    return isinstance(value, str) and _LINK_VALUE.fullmatch(value) is not None


def suggest(name: str, names: Iterable[str]) -> str | None:
    """Give the name that was probably meant, if any is close."""
    folded = {known.casefold(): known for known in names}
    close = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.75)
    return folded[close[0]] if close else None


def unknown_names(layers: Iterable[Layer], known: Collection[str]) -> Iterator[Problem]:
    """Find names with our prefixes that no variable has; service links are none of our business."""
    for layer in layers:
        for name, given in layer.given.items():
            if not name.startswith(PREFIXES) or name in known or name.removesuffix(FILE_SUFFIX) in known:
                continue
            if is_service_link(name, given.value):
                continue
            meant = suggest(name, known)
            yield warning(
                name,
                given.place,
                "there is no such setting",
                f"did you mean {meant}?" if meant else "see `fdcache env show --all` for those there are",
            )
