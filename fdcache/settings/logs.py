"""Logs of fdcache: level, lines, files in ``FD_LOG_DIR``, and the traceback of a crash."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from contextlib import suppress
from io import TextIOWrapper
from logging.handlers import TimedRotatingFileHandler
from pathlib import Path
from types import TracebackType

from fdcache.errors import ConfigurationError
from fdcache.settings.kinds import printable
from fdcache.settings.loading import Settings
from fdcache.settings.sources import Source

_MOST_BYTES = 64 << 20
"""Size at which a log file is set aside before its day is over."""

_ENGINE = "fdcache-engine-"

LEVEL, DEBUG, FOLDER, DAYS = "FD_LOG_LEVEL", "FD_DEBUG", "FD_LOG_DIR", "FD_LOG_BACKUP_COUNT"

_LINE = "%(asctime)s %(levelname)s %(message)s"

logger = logging.getLogger("fdcache")


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return time, level, logger, message, the request if there is one, and the traceback if there is one."""
        fields = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request := getattr(record, "request", None)) is not None:
            fields["request"] = str(request)
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class TextFormatter(logging.Formatter):
    """Formats a record as one line of text. Control characters in names are escaped."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the line without the traceback."""
        record.message = printable(record.message)
        return super().formatMessage(record)


class LogFile(TimedRotatingFileHandler):
    """A file that its user alone may read, a new one for each day.

    One that has ``most_bytes`` before its day is over is set aside as ``*.earlier``, in place of the last such file.
    """

    def __init__(self, path: Path, days: int, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            super().__init__(path, when="D", backupCount=days, encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"FD_LOG_DIR: {path.parent} cannot be written: {error.strerror}; choose another directory"
            ) from error

    def _open(self) -> TextIOWrapper:
        fd = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if os.fstat(fd).st_uid == os.geteuid():
            os.fchmod(fd, 0o600)
        return os.fdopen(fd, "a", encoding=self.encoding)

    def shouldRollover(self, record: logging.LogRecord) -> int:  # noqa: N802
        """Return 1 once the day is over; set a file aside that is too large."""
        if super().shouldRollover(record):
            return 1
        if self.stream is None or os.fstat(self.stream.fileno()).st_size < self._most_bytes:
            return 0
        with suppress(FileNotFoundError):  # another program has moved it
            Path(self.baseFilename).replace(f"{self.baseFilename}.earlier")
        former, self.stream = self.stream, self._open()
        former.close()
        return 0

    def doRollover(self) -> None:  # noqa: N802
        """Begin the file of a new day; with 0 days keep none of the former ones."""
        super().doRollover()
        if self.backupCount == 0:
            for former in self.getFilesToDelete():
                Path(former).unlink(missing_ok=True)


def level_of(settings: Settings) -> int:
    """Return the level that the settings ask for."""
    chosen = settings.value(LEVEL)
    debug = chosen == "DEBUG" or (chosen is None and settings.value(DEBUG))
    return logging.DEBUG if debug else logging.INFO


def take_over(settings: Settings, name: str, *, as_text: bool) -> None:
    """Log all that fdcache says to standard error, and to ``name``.log where ``FD_LOG_DIR`` is set.

    For a process of fdcache's own. Raises ``ConfigurationError`` when the file cannot be written.
    """
    formatter = TextFormatter(_LINE) if as_text else JsonFormatter()
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if (file := _file(settings, name)) is not None:
        handlers.append(file)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    for handler in handlers:
        handler.setFormatter(formatter)
        logger.addHandler(handler)
    logger.setLevel(level_of(settings))
    logger.propagate = False


def follow(settings: Settings) -> None:
    """Give fdcache's loggers the level and the file that the settings name, in a process of the application's own.

    What the application has set stays otherwise, and its handlers get the lines as well. The file is
    ``fdcache-engine-<process>.log``. Raises ``ConfigurationError`` when it cannot be written.
    """
    if settings.source(LEVEL) is not Source.DEFAULT or settings.value(DEBUG):
        logger.setLevel(level_of(settings))
        if not logger.hasHandlers():
            _add(logging.StreamHandler(), TextFormatter(_LINE))
    name = f"{_ENGINE}{os.getpid()}"
    for handler in [each for each in logger.handlers if isinstance(each, LogFile)]:
        if not Path(handler.baseFilename).name.startswith(_ENGINE) or Path(handler.baseFilename).stem == name:
            return
        logger.removeHandler(handler)  # of the process that this one was forked from
        handler.close()
    if (file := _file(settings, name)) is not None:
        _remove_files_of_the_dead(Path(file.baseFilename), settings.value(DAYS))
        _add(file, JsonFormatter())
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)


def _add(handler: logging.Handler, formatter: logging.Formatter) -> None:
    handler.setFormatter(formatter)
    logger.addHandler(handler)


def _file(settings: Settings, name: str) -> LogFile | None:
    if settings.source(FOLDER) is Source.DEFAULT:
        return None
    return LogFile(settings.value(FOLDER) / f"{name}.log", settings.value(DAYS))


def _remove_files_of_the_dead(own: Path, most: int) -> None:
    """Remove files of engine processes that have ended, apart from the ``most`` newest."""
    ended = []
    for path in own.parent.glob(f"{_ENGINE}*.log*"):
        process = path.name.removeprefix(_ENGINE).partition(".")[0]
        if process.isdecimal() and path != own and not Path("/proc", process).exists():
            with suppress(OSError):  # another engine has removed it
                ended.append((path.lstat().st_mtime, path))
    for _, path in sorted(ended)[: max(len(ended) - most, 0)]:
        with suppress(OSError):  # or it is another user's
            path.unlink()


def log_crashes() -> None:
    """Log the traceback of an exception that ends this process, or one of its threads; for fdcache's own processes."""
    sys.excepthook = _crashed
    threading.excepthook = _thread_crashed


def _crashed(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    logger.critical("the process ends with %s", kind.__name__, exc_info=(kind, error, traceback))


def _thread_crashed(crash: threading.ExceptHookArgs) -> None:
    if crash.exc_type is SystemExit or crash.exc_value is None:
        return
    name = crash.thread.name if crash.thread is not None else "a thread"
    error = (crash.exc_type, crash.exc_value, crash.exc_traceback)
    logger.critical("thread %s ends with %s", name, crash.exc_type.__name__, exc_info=error)
