"""Hand-overs between instances in namespaces of their own, as containers have them: networks that part, same names."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from fdcache.manager import Request
from tests.handover_engine import Engine
from tests.network_help import Network, run
from tests.service_help import until
from tests.transfer_help import prompt_of

KEY = "of-the-tests-of-namespaces"
BLOCKS = 4


class Elsewhere:
    """A decode engine in a process of other namespaces."""

    def __init__(self, enter: Sequence[str], folder: Path, address: str) -> None:
        command = [*enter, sys.executable, "-m", "tests.handover_engine", str(folder), address, KEY]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        assert self.read() == "ready"

    def read(self) -> str:
        """Return the next line that it says."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, name: str, seed: int, peer: str) -> None:
        """Make it fetch a transfer."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name} {seed} {BLOCKS} {peer}\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def send(prefill: Engine, name: str, seed: int) -> None:
    prefill.send(Request(name, prompt_of(seed, BLOCKS)), name)
    prefill.step()


def test_a_network_that_parts_costs_seconds_and_heals(network: Network, tmp_path: Path) -> None:
    """A fetch that waits ends when the connection is known to be lost; a later one is refused at once."""
    here = f"tcp://{network.here}:7401"
    with Engine("prefill", tmp_path, "p", address=here, key=KEY, wait=2.0) as prefill:
        decode = Elsewhere(["ip", "netns", "exec", network.name], tmp_path, f"tcp://{network.there}:7401")
        try:
            send(prefill, "first", 1)
            decode.ask("first", 1, prefill.address)
            prefill.until(lambda: prefill.ended)
            assert decode.read().startswith("confirmed True")

            network.set("down")
            for name in ("parted", "again"):
                send(prefill, name, 2)
                decode.ask(name, 2, prefill.address)
                status, _, seconds, *reason = decode.read().split()
                assert status == "failed", reason
                assert float(seconds) < 30.0, "the timeout is 60 s"
            network.set("up")

            def is_handed_over() -> bool:
                send(prefill, "healed", 3)
                decode.ask("healed", 3, prefill.address)
                prefill.until(lambda: prefill.manager.get_stats().sending_blocks == 0)
                return decode.read().startswith("confirmed True")

            until(is_handed_over, "the network is there again")
            prefill.until(lambda: prefill.is_clean)
        finally:
            decode.close()


@pytest.mark.parametrize(
    "apart", [("--mount",), ("--mount", "--pid", "--fork", "--mount-proc")], ids=["mount", "pid"]
)
def test_two_decode_instances_with_the_same_address_both_work(tmp_path: Path, apart: tuple[str, ...]) -> None:
    """In containers each has a folder of its own under the same name. Prefill knows them by their boot ids."""
    private = tmp_path / "private"
    private.mkdir()
    mount = f"mount -t tmpfs none {private}"
    if not run("unshare", *apart, "sh", "-c", mount):
        pytest.skip("mount namespaces are not allowed here")
    enter = ["unshare", *apart, "--propagation", "private", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    with Engine("prefill", tmp_path, "p") as prefill:
        decodes = [Elsewhere(enter, tmp_path, f"ipc://{private}/decode") for _ in range(2)]
        try:
            for number in range(3):
                for index, decode in enumerate(decodes):
                    name, seed = f"{number}-{index}", 10 * number + index
                    send(prefill, name, seed)
                    decode.ask(name, seed, prefill.address)
                prefill.until(lambda: prefill.manager.get_stats().sending_blocks == 0)
                assert [decode.read().split()[:2] for decode in decodes] == [["confirmed", "True"]] * 2
            prefill.until(lambda: prefill.is_clean)
            assert set(prefill.ended) == {"done"}
        finally:
            for decode in decodes:
                decode.close()
