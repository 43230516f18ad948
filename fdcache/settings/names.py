"""Names that look like settings but are none, and what was probably meant."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection, Iterable, Iterator

from fdcache.settings.problems import Problem, note, warning
from fdcache.settings.sources import FILE_SUFFIX, OWN_PREFIX, PREFIXES, Layer

logger = logging.getLogger(__name__)

_logged: set[Problem] = set()

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


def _is_near_miss(name: str, known: str) -> bool:
    """Return whether a name is a known one misspelt. Names of the engine share words, so that each word counts."""
    words, meant = name.casefold().split("_"), known.casefold().split("_")
    if len(words) != len(meant):
        return _likeness(name, known) > 0.9
    return all(_likeness(*pair) >= 0.6 for pair in zip(words, meant, strict=True))


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def unknown_names(layers: Iterable[Layer], known: Collection[str]) -> Iterator[Problem]:
    """Find names with the prefixes of settings that no variable has; service links are left alone.

    Each release of the engine has names of its own that are not described here. They are worth a note; a warning is
    for what looks like a known name, and for names of fdcache.
    """
    for layer in layers:
        for name, given in layer.given.items():
            if not name.startswith(PREFIXES) or name in known or name.removesuffix(FILE_SUFFIX) in known:
                continue
            if is_service_link(name, given.value):
                continue
            is_own = name.startswith(OWN_PREFIX)
            meant = suggest(name, known)
            if meant and (is_own or _is_near_miss(name, meant)):
                yield warning(name, given.place, "there is no such setting", f"did you mean {meant}?")
            elif is_own:
                see = "see `fdcache env show --all` for those there are"
                yield warning(name, given.place, "there is no such setting", see)
            else:
                yield note(name, given.place, "fdcache does not know it", "it is left to the engine")


def log_misspelt(problems: Iterable[Problem]) -> None:
    """Warn of names that no setting has, of each once in a process."""
    for problem in problems:
        if problem not in _logged:
            _logged.add(problem)
            logger.warning("%s", problem)
