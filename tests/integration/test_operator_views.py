"""Commands in unusual cases: made-up client figures, unknown blocks, several namespaces, questions on a terminal."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fdcache.hashing import TokenBlocks, root_hash
from fdcache.manager import Request
from fdcache.service.client.connection import Connection
from fdcache.service.wire.liveness import LiveFile
from fdcache.service.wire.protocol import Heartbeat, Register
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.tiers.pool import TreeNode
from fdcache_cli.inspect_blocks import draw_trees
from tests.service_engine import BLOCK, PROMPT, Engine, layout
from tests.service_help import TIMEOUT, LocalService, local_service, run, until
from tests.terminals import drawn, on_terminal

MADE_UP = {
    "device": {
        "client": "somebody else",
        "tier": "host",
        "of": "[red]everything[/red]",
        "blocks": "[bold]all[/bold]",
        "ready": [[[1]] * 3, {"a": None}],
        "free": 10**300,
        "writing": -(10**25),
        "evictable": "\x1b[2Jgone",
        "evictions": True,
    },
    "counters": {"lookup_tokens": 10**300, "device_hit_tokens": "x", "host_hit_tokens": [7]},
    "plans_in_flight": {"very": ["deep", {"down": 1}]},
    "queued_backups": "z" * 5000,
    "live_requests": 1e300,
}
NAME = "engine[/bold]\x1b[2J\nfdcache"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    (tmp_path / "s").mkdir()
    with local_service(tmp_path / "s") as own:
        yield own


def assert_escaped_and_shortened(text: str) -> None:
    assert r"engine[/bold]\x1b[2J\nfdcache" in text
    assert "\x1b[2J" not in text
    assert "z" * 40 not in text and "0" * 40 not in text


def test_made_up_client_figures_are_shown_escaped_and_shortened(
    service: LocalService, tmp_path: Path
) -> None:
    line, live = Connection(service.address), LiveFile(service.directory)
    answer, _ = line.call(Register(layout().to_json().encode(), live.live, NAME), TIMEOUT)
    line.session = answer.session  # type: ignore[union-attr]
    line.call(Heartbeat(json.dumps(MADE_UP).encode()), TIMEOUT)
    for view in ("tiers", "clients", "transfers"):
        piped = run("inspect", view, "--server", service.address)
        assert (piped.returncode, piped.stderr) == (0, "")
        assert_escaped_and_shortened(piped.stdout)
        told = json.loads(run("inspect", view, "--json", "--server", service.address).stdout)
        assert told
    assert_escaped_and_shortened(drawn("inspect", "--server", service.address))
    text = run("inspect", "tiers", "--server", service.address).stdout
    assert "[bold]all[/bold]" in text and "somebody else" not in text and "everything" not in text
    (client,) = json.loads(run("inspect", "clients", "--json", "--server", service.address).stdout)
    assert client["figures"] == MADE_UP
    asked = run("reset", "--tier", "device", "--dry-run", "--server", service.address)
    assert (asked.returncode, asked.stderr) == (0, "")
    assert "\x1b" not in asked.stdout
    line.close()
    live.close()


@pytest.mark.parametrize("view", ["tiers", "clients", "transfers"])
def test_a_picture_of_made_up_client_figures_is_drawn(
    service: LocalService, tmp_path: Path, view: str
) -> None:
    pytest.importorskip("matplotlib")
    line, live = Connection(service.address), LiveFile(service.directory)
    answer, _ = line.call(Register(layout().to_json().encode(), live.live, NAME + r"$\frac$"), TIMEOUT)
    line.session = answer.session  # type: ignore[union-attr]
    line.call(Heartbeat(json.dumps(MADE_UP).encode()), TIMEOUT)
    done = run("inspect", view, "--plot", str(tmp_path / "x.png"), "--server", service.address)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "x.png").stat().st_size > 5000
    line.close()
    live.close()


class TestBlocksAndPrompts:
    def test_an_unknown_block_is_reported(self, service: LocalService) -> None:
        done = run("inspect", "block", "0123abcd", "--server", service.address)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("no block that begins with 0123abcd is there")

    @pytest.mark.parametrize("prefix", ["abc", "xyzxyz", "0" * 65])
    def test_an_invalid_hash_is_a_usage_error(self, service: LocalService, prefix: str) -> None:
        done = run("inspect", "block", prefix, "--server", service.address)
        assert done.returncode == 2
        assert "HASH: give 4 to 64 hexadecimal digits" in done.stderr

    def test_a_block_shows_whether_it_is_stored(self, tmp_path: Path) -> None:
        storage = {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_DIR": str(tmp_path / "storage")}
        (tmp_path / "s").mkdir()
        with local_service(tmp_path / "s", **storage, FDCACHE_STORAGE_SIZE="4MiB") as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            until(lambda: service.ask("storage")["blocks"] == 10, "the blocks are stored")
            (namespace,) = service.service.namespaces
            blocks = TokenBlocks(BLOCK, root_hash(namespace, None))
            blocks.append(PROMPT)
            key = blocks.hashes[3].tobytes().hex()
            (both,) = service.ask("block", hash=key[:10])
            assert both["stored"] is True and "slot" in both
            engine.close()
            service.ask("reset", tier="host")
            found = service.ask("block", hash=key)
            assert [each["stored"] for each in found] == [True] * len(found) != []
            assert not any("slot" in each for each in found)
            assert service.ask("block", hash="0" * 64) == []
            shown = run("inspect", "block", key, "--server", service.address).stdout
            assert "yes" in shown.splitlines()[1].split()

    def test_explain_takes_the_lookahead_of_draft_layers(self, service: LocalService, tmp_path: Path) -> None:
        settings = CacheSettings(
            server=service.address,
            device_blocks=32,
            write_policy=WritePolicy.WRITE_THROUGH,
            rpc_timeout=TIMEOUT,
            lookahead_tokens=1,
        )
        engine = Engine(service.address, settings=settings)
        engine.serve(PROMPT)
        engine.close()
        (tmp_path / "tokens").write_text(json.dumps(PROMPT))
        asked = [
            "inspect",
            "explain",
            "--tokens",
            str(tmp_path / "tokens"),
            "--server",
            service.address,
            "--json",
        ]
        assert json.loads(run(*asked).stdout)["broken_at"] == 0
        answer = json.loads(run(*asked, "--lookahead", "1").stdout)
        assert (answer["broken_at"], len(answer["blocks"])) == (None, (len(PROMPT) - 1) // BLOCK)

    def test_explain_tells_what_an_engine_loads_and_why(self, service: LocalService, tmp_path: Path) -> None:
        engine = Engine(service.address)
        engine.serve(PROMPT)
        (namespace,) = service.service.namespaces
        blocks = TokenBlocks(BLOCK, root_hash(namespace, None))
        blocks.append(PROMPT)
        last = blocks.hashes[-1].tobytes().hex()
        until(lambda: service.ask("block", hash=last), "the blocks are in the service")
        model = engine.manager._choices.model
        for _ in range(3):
            engine.manager.observe_prefill([(Request("observed", PROMPT), 0, 40)], 0.4)
            model.link.observe(engine.layout.payload_bytes, 5.0, time.monotonic())
        engine.manager.sleep()
        engine.manager.wakeup()
        assert engine.serve(PROMPT) == (0, [])
        (tmp_path / "tokens").write_text(json.dumps(PROMPT))

        def is_reported() -> bool:
            engine.manager.take_plans()
            return bool(service.ask("clients")[0]["figures"].get("loads", {}).get("judged"))

        until(is_reported, "the decision is reported")
        asked = ["inspect", "explain", "--tokens", str(tmp_path / "tokens"), "--server", service.address]
        shown = run(*asked).stdout.splitlines()[-1]
        assert "reused 0 of 10 cached blocks (nothing); expected 410 ms (all 5" in shown
        assert "no load 410 ms), took " in shown
        (decision,) = json.loads(run(*asked, "--json").stdout)["decisions"]
        assert (decision["choice"], decision["last_block"], decision["host_blocks"]) == ("nothing", last, 10)
        assert decision["expected_seconds"] == pytest.approx(0.41)
        assert decision["client"] and decision["true_seconds"] > 0
        engine.close()

    def test_explain_looks_for_the_blocks_of_an_adapter(self, service: LocalService, tmp_path: Path) -> None:
        engine = Engine(service.address)
        engine.serve(PROMPT, adapter_id="chat")
        (tmp_path / "tokens").write_text(json.dumps(PROMPT))
        asked = ["inspect", "explain", "--tokens", str(tmp_path / "tokens"), "--server", service.address]
        assert "the run ends before block 0" in run(*asked).stdout
        until(
            lambda: "a hit: all" in run(*asked, "--adapter", "chat").stdout, "the blocks are in the service"
        )
        engine.close()

    @pytest.mark.parametrize(
        ("text", "status", "said"),
        [
            ("[1, 2]", 0, "these tokens fill no block"),
            ("[1, 2", 2, "a list without its beginning or its end"),
            ("1, 2]", 2, "a list without its beginning or its end"),
            ("[1,2,,3]", 2, "no token id after the comma behind '2'"),
            ("1\n2 ,\n", 2, "no token id after the comma behind '2'"),
            ("[,1]", 2, "no token id before the first comma"),
            ("[[1,2,3]", 2, "'[1' is not a token id"),
            ("[]", 2, "has no token id"),
            (" \n", 2, "has no token id"),
            ("1 two 3", 2, "'two' is not a token id"),
            ("[1, -2]", 2, "'-2' is not a token id"),
            ("\udcff", 2, "is no text"),
        ],
    )
    def test_explain_with_too_few_or_invalid_tokens(
        self, service: LocalService, tmp_path: Path, text: str, status: int, said: str
    ) -> None:
        engine = Engine(service.address)
        engine.serve(PROMPT)
        (tmp_path / "tokens").write_bytes(text.encode(errors="surrogateescape"))
        done = run("inspect", "explain", "--tokens", str(tmp_path / "tokens"), "--server", service.address)
        engine.close()
        assert done.returncode == status
        assert said in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_trees_of_several_namespaces_have_their_names_above() -> None:
    one, two = (
        TreeNode(name, name * 32, parent=None, depth=0, hits=1, children=0, pins=0, idle_seconds=1.0)
        for name in ("aa", "bb")
    )
    assert draw_trees([one]) == ["aaaaaaaaaaaa  1 block, 1 hits, idle 1.0s"]
    lines = draw_trees([one, two])
    assert [line.split("  ")[0] for line in lines] == ["namespace aa", "a" * 12, "namespace bb", "b" * 12]
    assert draw_trees([]) == ["there are no blocks"]


class TestReset:
    @pytest.mark.parametrize(("answer", "status", "left"), [("n\n", 1, 10), ("y\n", 0, 0)])
    def test_reset_asks_on_the_terminal_and_prints_only_json(
        self, service: LocalService, answer: str, status: int, left: int
    ) -> None:
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: service.ask("namespaces")[0]["tier"]["ready"] == 10, "the blocks are there")
        engine.close()
        command = ("reset", "--tier", "host", "--json", "--server", service.address)
        code, asked, output = on_terminal(*command, answer=answer)
        assert code == status
        assert "would forget 10 blocks" in asked and "Forget them? [y/N]" in asked
        assert service.ask("namespaces")[0]["tier"]["ready"] == left
        if status == 0:
            assert json.loads(output)["host"][0]["blocks"] == 10
        else:
            assert output.strip() == ""


class TestRefused:
    @pytest.mark.parametrize("left_behind", [False, True])
    def test_an_address_without_a_service_fails_at_once(self, tmp_path: Path, left_behind: bool) -> None:
        path = tmp_path / "a.sock"
        if left_behind:
            with socket.socket(socket.AF_UNIX) as line:
                line.bind(str(path))
        done = run("inspect", "tiers", "--server", f"ipc://{path}")
        assert done.returncode == 1
        assert f"{path} does not exist" in done.stderr
        assert "is `fdcache serve` running?" in done.stderr

    def test_a_socket_directory_that_cannot_be_made_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        address = f"ipc://{tmp_path}/file/x.sock"
        done = run("serve", "--http", "off", "--socket", address, FDCACHE_ARENA_DIR=str(tmp_path))
        assert done.returncode == 78
        assert "choose another --socket" in done.stderr
        assert "Traceback" not in done.stderr

    def test_serve_check_requires_the_arena_directory(self, tmp_path: Path) -> None:
        done = run("serve", "--check", "--arena-dir", str(tmp_path / "none"))
        assert done.returncode == 78
        assert "mount a tmpfs there" in done.stderr

    def test_a_replay_at_a_service_refuses_host_memory(self, tmp_path: Path) -> None:
        done = run("replay", "--server", f"{tmp_path}/x.sock", "--host-memory", "1GiB", "--requests", "1")
        assert done.returncode == 2
        assert "give it to `fdcache serve`" in done.stderr

    def test_inspect_storage_of_files_refuses_watch(self, tmp_path: Path) -> None:
        done = run("inspect", "storage", str(tmp_path), "--watch")
        assert done.returncode == 2
        assert "PATH is read once" in done.stderr
