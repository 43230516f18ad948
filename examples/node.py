"""A service with several engines on one machine: one engine, a second one, two at once, and a look into the service.

    python examples/node.py [--stay]

The page of the service shows all of it while it runs; with --stay it can be looked at until Ctrl-C.
Each engine is a `fdcache replay` that verifies every byte it reuses. The second one finds the first one's blocks in
the service's host tier. At the end no process, socket or shared memory is left. The environment configures them, for
example `FDCACHE_HOST_MEMORY=1GiB python examples/node.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

FDCACHE = [str(Path(sys.executable).with_name("fdcache"))]
SHARED_MEMORY = "/dev/shm"


def start(*arguments: str, **options: object) -> subprocess.Popen[str]:
    """Start a command of fdcache."""
    return subprocess.Popen([*FDCACHE, *arguments], text=True, **options)  # type: ignore[call-overload,no-any-return]


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for a command. Exits if it failed."""
    if process.wait() != 0:
        raise SystemExit(f"{process.args!r} ended with status {process.returncode}")


def say(text: str) -> None:
    """Print a heading."""
    print(f"\n=== {text}", flush=True)


def main() -> None:
    """Run the service, the engines and `fdcache inspect`."""
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
            "127.0.0.1:0",
            "--discard",  # or the memory stays for the next start
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert service.stdout is not None
            page = ""
            for line in service.stdout:
                print(line, end="", flush=True)
                if line.startswith("page"):
                    page = line.split()[1]
                if line.startswith("ready"):
                    break
            say(f"its page: {page} shows what follows, as long as it runs")
            say("one engine")
            finish(start(*chat))
            say("a second engine: it finds the first one's blocks on the host")
            finish(start(*chat))
            say("two at once")
            both = [start(*chat, "--seed", str(seed)) for seed in (1, 2)]
            for engine in both:
                finish(engine)
            say("inside the service")
            for view in ("tiers", "namespaces", "clients"):
                finish(start("inspect", view))
            finish(start("inspect", "tree", "--limit", "5"))
            if "--stay" in sys.argv[1:]:
                say(f"{page} stays until Ctrl-C")
                with suppress(KeyboardInterrupt):
                    signal.pause()
        finally:
            service.send_signal(signal.SIGTERM)
            status = service.wait()
        left = sorted(path.name for place in (arena, folder) for path in Path(place).iterdir())
        say(f"the service ended with status {status}; left behind: {', '.join(left) or 'nothing'}")
        if status or left:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
