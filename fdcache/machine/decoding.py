"""Errors of data that cannot be decoded."""

import msgspec

MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of ``msgspec`` for data of another kind, for text that is not UTF-8, and for data that is nested too deep."""
