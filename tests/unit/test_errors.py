"""The exception hierarchy, as drawn in its module."""

import re

from fdcache import errors
from fdcache.errors import FdcacheError
from fdcache.settings import SettingsError


def test_docstring_draws_the_hierarchy() -> None:
    drawn: dict[str, str] = {}
    above: dict[int, str] = {}
    for indent, name in re.findall(r"^( *)\* (\w+)", errors.__doc__ or "", flags=re.MULTILINE):
        above[len(indent)] = name
        drawn[name] = above.get(len(indent) - 2, "")
    classes = {each for each in vars(errors).values() if isinstance(each, type)} | {SettingsError}
    assert set(drawn) == {each.__name__ for each in classes}
    for each in classes - {FdcacheError}:
        assert drawn[each.__name__] in {base.__name__ for base in each.__bases__}


def test_every_error_is_caught_as_the_base_class() -> None:
    assert all(issubclass(each, FdcacheError) for each in vars(errors).values() if isinstance(each, type))
