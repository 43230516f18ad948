"""Peers and addresses that cannot be used: each is refused with its reason, and costs nothing that lasts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from fdcache.controller.cache_controller import CacheController
from fdcache.devices.shared_planes import PREFIX
from fdcache.errors import ConfigurationError, FdcacheError, TransferError
from fdcache.layout import KVLayout
from fdcache.manager import CacheManager, Request
from fdcache.manager.requests import PeerSource
from fdcache.manager.results import LoadOutcome
from fdcache.settings.cache import CacheSettings, CopySettings
from fdcache.settings.peers import PeerSettings
from fdcache.transfer.access import rank_address
from fdcache.transfer.handovers import Handovers, PeerTerms
from fdcache.transfer.messages import Envelope, LinkRefused, decode, encode
from tests.service_help import until
from tests.transfer_help import LAYOUT, Instance, prompt_of

MLA = KVLayout.mla(model="m", revision="1", num_layers=2, block_size=16, latent_dim=24, dtype="bfloat16")


def refusal(mine: Instance, name: str, address: str) -> str:
    """Return why a fetch of a prompt fails."""
    request = Request(name, prompt_of(1, 4))
    assert mine.fetch(request, PeerSource(name, (address,))) == 4
    mine.until(lambda: mine.outcomes)
    outcome = mine.outcomes.pop()
    assert outcome.recompute_from == 0
    mine.manager.finish([request])
    mine.until(lambda: mine.is_clean)
    return outcome.error_message or ""


class LaterVersion:
    """A prefill rank that speaks the next version of the protocol, and so cannot read this one."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}/later"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(self.address)

    def step(self) -> None:
        """Answer what has arrived."""
        while self._socket.poll(0):
            route, data = self._socket.recv_multipart()
            to = Envelope(b"p" * 16, decode(data)[0].sender)
            answer = bytearray(encode(to, LinkRefused("protocol", "version 2", "version 1")))
            answer[4] += 1
            self._socket.send_multipart([route, bytes(answer)])

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def later(tmp_path: Path) -> Iterator[LaterVersion]:
    peer = LaterVersion(tmp_path)
    yield peer
    peer.close()


def test_a_prefill_of_another_version_is_refused_at_once(tmp_path: Path, later: LaterVersion) -> None:
    with Instance("decode", tmp_path, "d") as mine:
        mine.fetch(Request("r", prompt_of(1, 4)), PeerSource("r", (later.address,)))
        mine.until(lambda: mine.outcomes, later)
        assert "refused: protocol: the peer speaks version 2, this process 1" in str(
            mine.outcomes[0].error_message
        )


def test_planes_that_cannot_be_mapped_are_refused_each_time_and_prefill_is_told(tmp_path: Path) -> None:
    with Instance("prefill", tmp_path, "p") as prefill, Instance("decode", tmp_path, "d") as mine:
        for path in tmp_path.glob(f"{PREFIX}*"):
            path.rename(tmp_path / f"hidden-{path.name}")
        for name in ("first", "second"):
            request = Request(name, prompt_of(1, 4))
            prefill.start(request)
            prefill.handovers.send([(request, name)])
            prefill.step()
            prefill.manager.finish([request])
            assert "cannot be opened" in refusal(mine, name, prefill.address)
            prefill.until(lambda: prefill.is_clean)
        assert prefill.results == ["not_wanted", "not_wanted"]


def test_addresses_of_latent_ranks_in_another_order_are_refused(tmp_path: Path) -> None:
    def settings(role: str, peer_ranks: int) -> PeerSettings:
        address = f"ipc://{tmp_path}/{role}"
        return PeerSettings(
            role=role,
            connector="ipc",
            address=address,
            directory=tmp_path,
            peer_ranks=peer_ranks,
            timeout=5.0,
        )

    ranks = [CacheController(CopySettings(), MLA.with_tp_size(2), rank=rank) for rank in range(2)]
    ranks.append(CacheController(CopySettings(), MLA))
    manager = CacheManager(CacheSettings(device_blocks=8), MLA)
    handovers = Handovers(manager, PeerTerms(settings("decode", 2)))
    try:
        for each in ranks:
            each.initialize_kv_cache(8, shared=tmp_path)
        addresses = [str(each.open_transfer(settings("prefill", 1))) for each in ranks[:2]]
        ranks[2].open_transfer(settings("decode", 2))
        request = Request("r", prompt_of(1, 4))
        manager.match_prefix([request])
        handovers.fetch([(request, PeerSource("r", tuple(reversed(addresses))))])
        assert manager.allocate_device_blocks([(request, request.num_tokens)])[0].ok
        for plan in manager.take_plans():
            ranks[2].submit_swap_tasks(plan)
        outcomes: list[LoadOutcome] = []

        def has_ended() -> bool:
            outcomes.extend(manager.apply(ranks[2].poll()))
            return bool(outcomes)

        until(has_ended, "the fetch ends")
        assert "is that of rank 1, from which this rank does not read" in str(outcomes[0].error_message)

        def states() -> list[str]:
            stats = ranks[2].transfer_stats()
            return [each.state for each in stats.peers] if stats else []

        until(lambda: states() == ["accepted"] * 2, "both ranks are accepted")
    finally:
        for each in ranks:
            each.shutdown()
        manager.close()


def test_sockets_to_addresses_that_nothing_is_wanted_from_are_closed(tmp_path: Path) -> None:
    with Instance("decode", tmp_path, "d", timeout=0.01) as mine:
        for index in range(3):
            assert "no peer answers" in refusal(mine, f"{index}", f"ipc://{tmp_path}/nobody-{index}")
        mine.until(lambda: not mine.transfers.peers)


def test_an_address_at_which_another_process_answers_is_refused_and_stays_with_it(tmp_path: Path) -> None:
    with Instance("prefill", tmp_path, "p") as prefill:
        with pytest.raises(TransferError, match="already in use; set FDCACHE_TRANSFER_ADDRESS to another"):
            Instance("prefill", tmp_path, "p")
        with Instance("decode", tmp_path, "d") as mine:
            mine.fetch(Request("r", prompt_of(1, 4)), prefill.source("r"))
            mine.until(lambda: [each.state for each in mine.transfers.peers] == ["accepted"])
    with Instance("prefill", tmp_path, "p"):
        pass


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"address": "ipc:///proc/none/x"}, "/proc/none/x.0 cannot be used: .*set FDCACHE_TRANSFER_ADDRESS"),
        ({"directory": "/proc/none"}, "/proc/none takes no file of planes: .*set FDCACHE_TRANSFER_DIR"),
    ],
)
def test_folders_that_take_no_file_are_refused_with_the_remedy(options: dict[str, str], words: str) -> None:
    settings = PeerSettings(**{"connector": "ipc", **options})
    controller = CacheController(CopySettings(), LAYOUT)
    with pytest.raises(FdcacheError, match=words):
        controller.initialize_kv_cache(4, shared=settings.directory)
        controller.open_transfer(settings)
    controller.shutdown()


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]"])
def test_an_address_that_names_no_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigurationError, match="write the host by which they reach it"):
        rank_address(f"tcp://{host}:7000", 0)
