"""A progress bar on standard error, for people; nothing where that is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[str, int, int], None] | None]:
    """A function that takes a name, how many are done, and how many there are; None without a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    from rich.progress import Progress, TaskID

    with Progress(console=console, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def advance(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(f"{what} {name}", total=total)
            bar.update(tasks[name], completed=done)

        yield advance
