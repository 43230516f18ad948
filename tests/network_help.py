"""Network namespaces for tests: nodes whose networks part."""

from __future__ import annotations

import os
import subprocess


def run(*command: str) -> bool:
    """Run a command; return True if it is there and succeeds."""
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


class Network:
    """A namespace with a network of its own, and a cable to it."""

    def __init__(self) -> None:
        number = os.getpid() % 10_000
        self.name, self.cable = f"fdcache-{number}", f"fdc{number}a"
        self.here, self.there = f"10.213.{number % 250}.1", f"10.213.{number % 250}.2"

    def make(self) -> bool:
        """Make it; return False where that is not allowed."""
        inside = ["ip", "netns", "exec", self.name]
        other = self.cable[:-1] + "b"
        return (
            run("ip", "netns", "add", self.name)
            and run("ip", "link", "add", self.cable, "type", "veth", "peer", "name", other)
            and run("ip", "link", "set", other, "netns", self.name)
            and run("ip", "addr", "add", f"{self.here}/24", "dev", self.cable)
            and run("ip", "link", "set", self.cable, "up")
            and run(*inside, "ip", "addr", "add", f"{self.there}/24", "dev", other)
            and run(*inside, "ip", "link", "set", other, "up")
        )

    def set(self, state: str) -> None:
        """Pull the cable (down), or put it in again (up)."""
        assert run("ip", "link", "set", self.cable, state)

    def remove(self) -> None:
        """Remove it, with the cable."""
        run("ip", "link", "delete", self.cable)
        run("ip", "netns", "delete", self.name)
