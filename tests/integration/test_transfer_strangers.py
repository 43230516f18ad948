"""Peers that are wrong or hostile: each is refused by itself, and hand-overs of others go on."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import zmq

from fdcache.errors import ConfigurationError
from fdcache.manager import Request
from fdcache.manager.requests import PeerSource
from fdcache.service.wire.liveness import PREFIX, Live, LiveFile
from fdcache.settings.peers import PeerSettings
from fdcache.transfer.links import machine_id
from fdcache.transfer.messages import (
    NO_BOOT,
    AnyMessage,
    End,
    EndReason,
    Envelope,
    Identity,
    LinkHello,
    LinkRefused,
    LinkWelcome,
    Stranger,
    decode,
    encode,
)
from tests.transfer_help import Instance, prompt_of
from tests.transfer_peer import Peer

KEY = "a secret of all instances"


class Outsider:
    """A process that speaks the protocol, and says whatever a test wants."""

    def __init__(self, address: str, boot: bytes | None = None, route: bytes | None = None) -> None:
        self.boot = boot or uuid.uuid4().bytes
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, route or b"d" + self.boot)
        self._socket.connect(address)

    def send(self, message: AnyMessage, target: bytes = NO_BOOT) -> None:
        self._socket.send(encode(Envelope(self.boot, target), message))

    def answer(self, seconds: float = 10.0) -> AnyMessage | None:
        """Return the next message, None if there is none within that time."""
        return decode(self._socket.recv())[1] if self._socket.poll(int(seconds * 1000)) else None

    def greet(self, identity: Identity, seconds: float = 10.0, **changes: object) -> AnyMessage | None:
        """Introduce itself as a decode rank that fits, but for some fields; return the answer."""
        self.send(LinkHello(msgspec.structs.replace(identity, boot=self.boot, **changes)))
        return self.answer(seconds)

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def outsider(address: str, **options: bytes) -> Iterator[Outsider]:
    peer = Outsider(address, **options)
    try:
        yield peer
    finally:
        peer.close()


def identity_of(mine: Instance) -> Identity:
    """Return the identity of a decode rank that fits an instance."""
    transfer = mine.controller._parts.transfer
    assert transfer is not None
    return msgspec.structs.replace(transfer.endpoint._links.mine, role="decode", address="ipc:///nowhere")


def hand_over(prefill: Instance, name: str) -> None:
    """Hand a prompt over to another instance, and compare its bytes."""
    with Instance("decode", prefill.settings.directory, name) as mine:
        theirs, request = Request(name, prompt_of(3, 4)), Request(name, prompt_of(3, 4))
        prefill.start(theirs)
        prefill.handovers.send([(theirs, name)])
        prefill.step()
        prefill.compute(theirs, name)
        assert mine.fetch(request, prefill.source(name)) == 4
        mine.until(lambda: mine.outcomes, prefill)
        assert mine.outcomes[0].recompute_from >= 4 * 16
        assert mine.wrong_blocks(request, 0, 4) == []
        mine.manager.finish([request])
        prefill.manager.finish([theirs])
        prefill.until(lambda: prefill.is_clean and mine.is_clean, mine)


@pytest.fixture
def prefill(tmp_path: Path) -> Iterator[Instance]:
    with Instance("prefill", tmp_path, "p") as instance:
        yield instance


def live_at(path: str, pid: int = 1 << 30) -> Live:
    return Live(path, path, pid, 1, 1)


@pytest.mark.parametrize(
    "path",
    ["/", "", "x" * 300, f"/{'y' * 5000}", f"/etc/passwd/{PREFIX}1", "/dev/watchdog", "\0"],
    ids=["root", "empty", "long name", "long path", "below a file", "device", "zero byte"],
)
def test_a_peer_whose_live_file_is_none_costs_nobody_else_anything(prefill: Instance, path: str) -> None:
    with outsider(prefill.address) as peer:
        answer = peer.greet(identity_of(prefill), live=live_at(path), machine=machine_id())
        assert isinstance(answer, LinkWelcome | LinkRefused)
        hand_over(prefill, "d")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_live_file_in_a_folder_of_another_user_is_not_looked_at(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    path = private / f"{PREFIX}1"
    path.touch()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # the other user's view of it, without pytest's own state
        from fdcache.service.wire.liveness import Watch

        os.setresuid(65534, 65534, 65534)
        try:
            watch = Watch(live_at(str(path)))
            os.write(writer, f"{watch.is_visible} {watch.is_gone()}".encode())
        except BaseException as error:  # noqa: BLE001
            os.write(writer, repr(error).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    assert os.read(reader, 200) == b"False False"
    os.close(reader)


def test_a_message_of_the_wrong_side_is_counted_and_ignored(prefill: Instance) -> None:
    with outsider(prefill.address) as peer:
        welcome = peer.greet(identity_of(prefill))
        assert isinstance(welcome, LinkWelcome)
        peer.send(welcome, welcome.side.boot)
        prefill.until(lambda: prefill.transfers.protocol_errors == 1)
        hand_over(prefill, "d")


def test_a_peer_that_speaks_for_another_is_ignored(prefill: Instance) -> None:
    with outsider(prefill.address) as peer, outsider(prefill.address) as liar:
        welcome = peer.greet(identity_of(prefill))
        assert isinstance(welcome, LinkWelcome)
        liar.boot = peer.boot
        liar.send(End("r", 1, EndReason.DONE), welcome.side.boot)
        liar.send(LinkHello(msgspec.structs.replace(identity_of(prefill), boot=peer.boot)))
        prefill.until(lambda: prefill.transfers.protocol_errors == 2)


def test_a_peer_at_the_address_of_a_living_one_replaces_nothing(prefill: Instance) -> None:
    with outsider(prefill.address) as peer, outsider(prefill.address) as second:
        first = peer.greet(identity_of(prefill), address="ipc:///same", live=None)
        assert isinstance(first, LinkWelcome)
        assert isinstance(second.greet(identity_of(prefill), address="ipc:///same", live=None), LinkWelcome)
        assert isinstance(peer.greet(identity_of(prefill), address="ipc:///same", live=None), LinkWelcome)
        prefill.until(lambda: len(prefill.transfers.peers) == 2)


def test_a_silent_peer_of_which_nothing_is_known_is_forgotten_and_may_come_back(
    prefill: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    with outsider(prefill.address) as peer:
        welcome = peer.greet(identity_of(prefill), live=None)
        assert isinstance(welcome, LinkWelcome)
        monkeypatch.setattr("fdcache.transfer.links._IDLE_SECONDS", 0.0)
        prefill.until(lambda: not prefill.transfers.peers)
        monkeypatch.undo()
        peer.send(End("r", 1, EndReason.DONE), welcome.side.boot)
        assert isinstance(peer.answer(), Stranger)
        assert isinstance(peer.greet(identity_of(prefill), live=None), LinkWelcome)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://\udcff:1",
        "tcp://\0:1",
        "ipc:///\0",
        "inproc://zeromq.zap.01",
        "tipc://{1,2,3}",
        "tcp://host",
        "ipc://@name",
        "",
    ],
)
def test_an_address_that_no_rank_can_have_costs_its_own_fetch_alone(tmp_path: Path, address: str) -> None:
    with Instance("decode", tmp_path, "d", key=KEY, timeout=10_000.0) as mine:
        before = identity_of(mine).boot
        mine.fetch(Request("r", prompt_of(1, 4)), PeerSource("r", (address,)))
        mine.until(lambda: mine.outcomes)
        assert "write ipc:///directory/name or tcp://host:port" in str(mine.outcomes[0].error_message)
        assert identity_of(mine).boot == before


def test_a_process_that_took_the_boot_id_of_another_bans_it_not(tmp_path: Path, prefill: Instance) -> None:
    live = LiveFile(tmp_path)
    boot = uuid.uuid4().bytes
    with outsider(prefill.address, boot=boot) as liar:
        assert isinstance(liar.greet(identity_of(prefill), live=live.live, machine=machine_id()), LinkWelcome)
    live.close()
    prefill.until(lambda: not prefill.transfers.peers)
    with outsider(prefill.address, boot=boot) as peer:
        assert peer.greet(identity_of(prefill), 0.5, live=live.live, machine=machine_id()) is None
        assert isinstance(peer.greet(identity_of(prefill), live=None), LinkWelcome)


# --- keys ------------------------------------------------------------------------------------------------------------


def test_an_address_in_the_network_without_a_key_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for key, words in ((None, "set FDCACHE_TRANSFER_KEY"), ("short", "can be guessed; use at least 16")):
        with pytest.raises(ConfigurationError, match=words):
            Instance("prefill", tmp_path, "p", address="tcp://127.0.0.1:7411", key=key)


def test_a_key_is_shown_nowhere(tmp_path: Path) -> None:
    settings = PeerSettings(key=KEY)
    assert KEY not in f"{settings} {settings!r} {settings.model_dump()}"


def test_who_does_not_know_the_key_learns_and_moves_nothing(tmp_path: Path) -> None:
    port = 20_000 + os.getpid() % 20_000
    address = f"tcp://127.0.0.1:{port}"
    with Instance("prefill", tmp_path, "p", address=address, key=KEY) as prefill:
        with outsider(address) as plain:
            plain.send(LinkHello(identity_of(prefill)))
            assert plain.answer(0.5) is None
        with Instance("decode", tmp_path, "d", key="another secret of sixteen", timeout=1.0) as other:
            other.fetch(Request("r", prompt_of(1, 4)), prefill.source("r"))
            other.until(lambda: other.outcomes, prefill)
            assert other.outcomes[0].recompute_from == 0
        assert not prefill.transfers.peers
        with Instance("decode", tmp_path, "e", key=KEY) as mine:
            theirs, request = Request("k", prompt_of(3, 4)), Request("k", prompt_of(3, 4))
            prefill.start(theirs)
            prefill.handovers.send([(theirs, "k")])
            prefill.step()
            prefill.compute(theirs, "k")
            assert mine.fetch(request, prefill.source("k")) == 4
            mine.until(lambda: mine.outcomes, prefill)
            assert mine.outcomes[0].recompute_from >= 4 * 16 and mine.wrong_blocks(request, 0, 4) == []


def test_a_peer_in_the_network_without_a_key_is_refused(tmp_path: Path) -> None:
    with Instance("decode", tmp_path, "d") as mine:
        mine.fetch(Request("r", prompt_of(1, 4)), PeerSource("r", ("tcp://127.0.0.1:9",)))
        mine.until(lambda: mine.outcomes)
        assert "needs FDCACHE_TRANSFER_KEY" in str(mine.outcomes[0].error_message)


# --- peers that are gone ---------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each instance be on a machine of its own: the kernel proves nothing of its peers."""
    monkeypatch.setattr("fdcache.transfer.endpoint.machine_id", lambda: uuid.uuid4().hex)


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_fetch_from_a_machine_that_is_gone_ends_long_before_its_deadline(
    tmp_path: Path, elsewhere: None, end: str
) -> None:
    peer = Peer("prefill", tmp_path, "peer", connector="ipc")
    try:
        with Instance("decode", tmp_path, "d", timeout=10_000.0) as mine:
            request = Request("r", prompt_of(1, 4))
            assert mine.fetch(request, PeerSource("r", tuple(peer.addresses))) == 4
            mine.until(lambda: [each.state for each in mine.transfers.peers] == ["accepted"])
            getattr(peer, end)()
            mine.until(lambda: mine.outcomes)
            assert mine.results == ["peer_gone"]
            mine.manager.finish([request])
            mine.outcomes.clear()
            late = Request("late", prompt_of(2, 4))
            assert mine.fetch(late, PeerSource("late", tuple(peer.addresses))) == 4
            mine.until(lambda: mine.outcomes)
            assert "no peer answers at" in str(mine.outcomes[0].error_message)
            mine.manager.finish([late])
            mine.until(lambda: mine.is_clean)
    finally:
        peer.close()


def test_a_peer_that_comes_back_is_read_from_again(tmp_path: Path) -> None:
    with Instance("decode", tmp_path, "d", timeout=10_000.0) as mine:
        early = Request("early", prompt_of(1, 4))
        assert mine.fetch(early, PeerSource("early", (f"ipc://{tmp_path}/p.0",))) == 4
        mine.until(lambda: mine.outcomes)
        assert "no peer answers at" in str(mine.outcomes[0].error_message)
        with Instance("prefill", tmp_path, "p") as prefill:
            theirs, request = Request("k", prompt_of(3, 4)), Request("k", prompt_of(3, 4))
            prefill.start(theirs)
            prefill.handovers.send([(theirs, "k")])
            prefill.step()
            prefill.compute(theirs, "k")
            mine.outcomes.clear()
            mine.until(lambda: not mine.transfers.peers or mine.transfers.peers[0].state != "refused")
            assert mine.fetch(request, prefill.source("k")) == 4
            mine.until(lambda: mine.outcomes, prefill)
            assert mine.outcomes[0].recompute_from >= 4 * 16 and mine.wrong_blocks(request, 0, 4) == []


def test_a_machine_that_takes_the_connection_and_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Instance("decode", tmp_path, "d", key=KEY, timeout=20.0) as mine,
    ):
        mine.fetch(
            Request("r", prompt_of(1, 4)), PeerSource("r", (f"tcp://127.0.0.1:{silent.getsockname()[1]}",))
        )
        mine.until(lambda: mine.outcomes)
        assert mine.results == ["refused"], "not at its deadline"


def test_the_first_fetch_after_a_quiet_time_is_handed_over(
    tmp_path: Path, elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Instance("prefill", tmp_path, "p") as prefill, Instance("decode", tmp_path, "d") as mine:
        assert_handed_over(prefill, mine, "first")
        monkeypatch.setattr("fdcache.transfer.links._IDLE_SECONDS", 0.0)
        prefill.until(lambda: not prefill.transfers.peers)
        monkeypatch.undo()
        assert_handed_over(prefill, mine, "second")


def test_the_first_fetch_after_prefill_began_again_at_its_port_is_handed_over(
    tmp_path: Path, elsewhere: None
) -> None:
    address = f"tcp://127.0.0.1:{20_000 + os.getpid() % 20_000}"
    with Instance("decode", tmp_path, "d", key=KEY) as mine:
        for name in "abc":
            with Instance("prefill", tmp_path, name, address=address, key=KEY) as prefill:
                assert_handed_over(prefill, mine, name)


def assert_handed_over(prefill: Instance, mine: Instance, name: str) -> None:
    """Hand a prompt over to an instance that may know the other, and compare its bytes."""
    seed = sum(name.encode())
    theirs, request = Request(name, prompt_of(seed, 4)), Request(name, prompt_of(seed, 4))
    prefill.start(theirs)
    prefill.handovers.send([(theirs, name)])
    prefill.step()
    prefill.compute(theirs, name)
    mine.outcomes.clear()
    assert mine.fetch(request, prefill.source(name)) == 4
    mine.until(lambda: mine.outcomes, prefill)
    assert mine.outcomes[0].error_message is None
    assert mine.outcomes[0].recompute_from >= 4 * 16
    assert mine.wrong_blocks(request, 0, 4) == []
    mine.manager.finish([request])
    prefill.manager.finish([theirs])
    prefill.until(lambda: prefill.is_clean and mine.is_clean, mine)


class Line:
    """A TCP connection between two instances, which a test cuts."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End every connection; a new one is accepted at once."""
        ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._ends += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_what_is_lost_with_a_connection_is_told_again_at_once(tmp_path: Path) -> None:
    port = 40_000 + os.getpid() % 20_000
    line = Line(port)
    with (
        Instance("prefill", tmp_path, "p", address=f"tcp://127.0.0.1:{port}", key=KEY) as prefill,
        Instance("decode", tmp_path, "d", key=KEY, timeout=10_000.0, lease=600.0) as mine,
    ):
        for count in range(3):
            name = f"r{count}"
            theirs, request = (Request(name, prompt_of(count, 4)) for _ in range(2))
            prefill.start(theirs)
            prefill.handovers.send([(theirs, name)])
            prefill.step()
            prefill.compute(theirs, name)
            line.cut()
            assert mine.fetch(request, PeerSource(name, (line.address,))) == 4
            mine.until(lambda: mine.outcomes, prefill)
            assert mine.outcomes.pop().recompute_from >= 4 * 16 and mine.wrong_blocks(request, 0, 4) == []
            mine.manager.finish([request])
            prefill.manager.finish([theirs])
    line.close()
