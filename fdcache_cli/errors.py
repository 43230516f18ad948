"""What a failed command prints and which status it ends with."""

import sys
from collections.abc import Callable

from fdcache.errors import ConfigurationError, FdcacheError

FAILED = 1
USAGE = 2
BAD_CONFIGURATION = 78  # EX_CONFIG of sysexits.h
INTERRUPTED = 130


def guard(command: Callable[[], object]) -> None:
    """Run ``command``; an error that fdcache raised on purpose is printed without a traceback."""
    try:
        command()
    except ConfigurationError as error:
        fail(str(error), BAD_CONFIGURATION)
    except FdcacheError as error:
        fail(str(error), FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def fail(message: str, status: int) -> None:
    """Print ``message`` on standard error and end with ``status``."""
    sys.stderr.write(f"error: {message}\n")
    sys.exit(status)
