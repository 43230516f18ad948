"""The whole thing on one machine: a service, two engines one after the other, then at once, a look inside, the end.

    python examples/node.py

Each engine is a `fdcache replay` that verifies every byte it reuses. What the first one stored, the second finds
in the service's host tier. At the end no process, socket or shared memory is left. The environment configures them, as
`FDCACHE_HOST_MEMORY=1GiB python examples/node.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

FDCACHE = [sys.executable, "-m", "fdcache_cli.main"]
SHARED_MEMORY = "/dev/shm"


def start(*arguments: str, **options: object) -> subprocess.Popen[str]:
    """Start a command of fdcache."""
    return subprocess.Popen([*FDCACHE, *arguments], text=True, **options)  # type: ignore[call-overload,no-any-return]


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for it; it must have ended well."""
    if process.wait() != 0:
        raise SystemExit(f"{process.args!r} ended with status {process.returncode}")


def say(text: str) -> None:
    """A heading, ahead of what the commands print."""
    print(f"\n=== {text}", flush=True)


def main() -> None:
    """Run it."""
    with (
        tempfile.TemporaryDirectory(prefix="fdcache-demo-") as folder,
        tempfile.TemporaryDirectory(prefix="fdcache-demo-", dir=SHARED_MEMORY) as arena,
    ):
        os.environ["FDCACHE_RUNTIME_DIR"] = folder
        os.environ["FDCACHE_ARENA_DIR"] = arena
        os.environ["FDCACHE_SERVER"] = f"ipc://{folder}/fdcache.sock"
        os.environ.setdefault("FDCACHE_HOST_MEMORY", "64MiB")
        os.environ.setdefault("FDCACHE_WRITE_POLICY", "write_through")
        chat = ("replay", "--workload", "chat", "--requests", "200")
        say("a service")
        service = start(
            "serve",
            "--http",
            "off",
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert service.stdout is not None
            for line in service.stdout:
                print(line, end="", flush=True)
                if line.startswith("ready"):
                    break
            say("one engine")
            finish(start(*chat))
            say("another one after it: it finds on the host what the first one stored")
            finish(start(*chat))
            say("two at once")
            both = [start(*chat, "--seed", str(seed)) for seed in (1, 2)]
            for engine in both:
                finish(engine)
            say("what the service holds")
            for what in ("tiers", "namespaces", "clients"):
                finish(start("inspect", what))
            finish(start("inspect", "tree", "--limit", "5"))
        finally:
            service.send_signal(signal.SIGTERM)
            status = service.wait()
        left = sorted(path.name for place in (arena, folder) for path in Path(place).iterdir())
        say(f"the service ended with status {status}; left behind: {', '.join(left) or 'nothing'}")
        if status or left:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
