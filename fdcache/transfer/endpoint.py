"""The hand-overs of one rank: one thread that owns the sockets, the connector and both state machines."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import zmq

from fdcache.errors import TransferError
from fdcache.metadata import HandoverEnd, Int32Array, PeerTask, SwapPurpose
from fdcache.settings.peers import PeerSettings, TransferRole
from fdcache.tasks import Event, Execution, HandoverTask
from fdcache.tiers.statistics import HandoverTally
from fdcache.transfer import decode, prefill
from fdcache.transfer.access import open_live_file, rank_address
from fdcache.transfer.connector import (
    LocalPlanes,
    Notifier,
    PeerView,
    ReadOutcome,
    Stager,
    TransferContext,
    TransferStats,
    agreed_fingerprint,
    share,
)
from fdcache.transfer.decode import BeginRead, ComputeTargetSums, DecodeSide, FetchEnd, FetchEnded
from fdcache.transfer.factory import open_connector
from fdcache.transfer.links import Links, LinkState, machine_id
from fdcache.transfer.messages import BlocksGranted, Envelope, Identity, encode
from fdcache.transfer.peer_fetches import PeerFetches
from fdcache.transfer.prefill import (
    ComputeSums,
    OfferEnded,
    PlacesRead,
    PublishPart,
    SendMessage,
)
from fdcache.transfer.sends import PlaceShares, Publisher, Sends

logger = logging.getLogger(__name__)

_IDLE_MS = 200
_BUSY_MS = 20
_POLLING_MS = 1
_START_SECONDS = 30.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """Parameters of an endpoint. Without ``verifies`` blocks are used as they arrive, for tests that must see it."""

    settings: PeerSettings
    rank: int
    lookahead_tokens: int = 0
    verifies: bool = True
    groups: tuple[tuple[int, int], ...] = ()
    """Ranges of layers that are announced together."""
    state_parts: tuple[int, ...] = ()
    """Bytes of the parts of a state in a plane, each of which ranks share evenly."""


class TransferEndpoint:
    """Sends and fetches of one rank, from their plan to their report.

    ``submit`` and the other calls may come from any thread and return at once. Raises ``TransferError`` if the
    connector or the address cannot be used.
    """

    def __init__(self, planes: LocalPlanes, options: EndpointOptions) -> None:
        self._planes, self._options = planes, options
        self._settings = settings = options.settings
        layout = planes.layout
        self.groups = options.groups or ((0, layout.total_layers),)
        """Ranges of layers that are announced together."""
        self.address = rank_address(settings.address, options.rank)
        self._sharing = share(layout, options.rank, settings.peer_ranks, options.state_parts)
        self._commands: deque[Callable[[float], None]] = deque()
        self._sums: deque[Callable[[], None]] = deque()
        """Parts to sum, one at a time, as messages and reads come first."""
        self._tally = HandoverTally()
        self._lock = threading.Lock()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Event()
        self._ended: str | None = None
        """Why nothing is handed over now."""
        self._unread: list[PeerFetches] = []
        """Fetches from before a failure, into whose slots a read may still write."""
        self._failures: list[BaseException] = []
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fdcache-transfer", daemon=True)
        self._thread.start()
        if not self._started.wait(_START_SECONDS):
            raise TransferError(f"FDCACHE_TRANSFER={settings.connector}: not started in {_START_SECONDS:g} s")
        for failure in self._failures:
            os.close(self._wakeup)
            raise failure

    # --- any thread -------------------------------------------------------------------------------------------

    def submit(self, task: PeerTask, after: Event | None = None) -> Execution:
        """Begin a hand-over; its execution ends once nothing accesses its slots any more.

        ``after``: on a GPU, the work that computes blocks of a send, or still uses slots of a fetch.
        """
        handover = HandoverTask(task, self._options.rank, partial(self.cancel, task.plan_id))
        is_send = task.swap.purpose is SwapPurpose.SEND
        with self._lock:
            if self._ended is not None:
                return self.refuse(task, self._ended)
            if is_send:
                self._sends.add(task, handover)
                self._command(partial(self._sends.offer, task))
            else:
                self._command(partial(self._begin_fetch, task, handover, after))
        if is_send and task.computed:
            for _, last in self.groups:
                self.layer_computed(last - 1, {task.transfer: task.computed}, lambda: after)
        return handover.execution

    def refuse(self, task: PeerTask, reason: str) -> Execution:
        """Return the execution of a hand-over that cannot begin."""
        handover = HandoverTask(task, self._options.rank, lambda: None)
        handover.finish(HandoverEnd("", FetchEnd.REFUSED.value, 0), 0, (), 0, reason)
        return handover.execution

    def cancel(self, plan_id: int) -> None:
        """End a hand-over that is not needed any more, and tell the peer. Slots of a send may be overwritten then."""
        self._sends.give_up(plan_id)
        self._command(partial(self._cancel, plan_id))

    def connect(self, addresses: Sequence[str]) -> None:
        """Connect to the ranks of a prefill instance that this one will read from, before the first fetch."""
        for rank, _ in self._sharing.sources:
            if rank < len(addresses):
                self._command(partial(self._connect, addresses[rank]))

    def layer_computed(
        self, layer: int, computed: Mapping[str, int], record: Callable[[], Event | None] | None = None
    ) -> None:
        """Mark a layer of the leading blocks of some transfers as computed, once the event of ``record`` is reached."""
        if self._sends.layer_computed(layer, computed, record):
            self._wake()

    def blocks_computed(
        self,
        plan_id: int,
        first: int,
        slots: Int32Array,
        record: Callable[[], Event | None] | None = None,
        layer: int | None = None,
    ) -> None:
        """Hand over blocks of a send from ``first`` on, in slots known by now, after the event of ``record``."""
        if self._sends.blocks_computed(plan_id, first, slots, record, layer):
            self._wake()

    def stats(self) -> TransferStats:
        """Return a snapshot, made by the thread of the endpoint."""
        answer: list[TransferStats] = []
        ready = threading.Event()

        def make(now: float) -> None:
            answer.append(self._make_stats(now))
            ready.set()

        self._command(make)
        if not ready.wait(0.0 if self._ended is not None else 5.0):
            raise TransferError(self._ended or "the thread of the hand-overs does not answer")
        return answer[0]

    def close(self) -> None:
        """End every hand-over, tell the peers, and release everything. Idempotent."""
        if self._thread.is_alive():
            self._closing.set()
            self._wake()
            self._thread.join()
        for fetches in (*self._unread, self._fetches):
            fetches.drop_all("the instance is shut down", read=True)
        if self._wakeup >= 0:
            os.close(self._wakeup)
            self._wakeup = -1

    def _command(self, command: Callable[[float], None]) -> None:
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        if self._wakeup >= 0:
            os.eventfd_write(self._wakeup, 1)

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._open()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that made the endpoint
            self._failures.append(error)
            return
        finally:
            self._started.set()
        while True:
            reason = "the instance is shut down"
            try:
                while not self._closing.is_set():
                    self._step()
            except Exception as error:
                logger.exception("hand-overs have failed; they begin anew under another boot id")
                reason = f"{type(error).__name__}: {error}"
            self._end_all(reason)
            self._links.close()
            self._live.close()
            if not self._begin_anew():
                return

    def _begin_anew(self) -> bool:
        """Open everything again after a failure, as often as it takes; return False once the instance is shut down."""
        if len(self._fetches):
            self._unread.append(self._fetches)
        pause = _FIRST_PAUSE
        while not self._closing.wait(pause):
            pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                self._open()
            except Exception:
                logger.exception("hand-overs cannot begin anew; the next try is in %g s", pause)
                continue
            with self._lock:
                self._ended = None
            logger.warning("hand-overs go on as boot %s", self._links.mine.boot.hex()[:8])
            return True
        return False

    def _open(self) -> None:
        options, layout = self._options, self._planes.layout
        boot = uuid.uuid4().bytes
        context = TransferContext(self._planes, self._settings, boot, self._wake)
        self._connector = open_connector(context)
        self._decode = DecodeSide(
            layout.num_planes,
            lease=self._settings.lease,
            renew=self._settings.renew,
            verifies=options.verifies,
            acknowledges=self._connector.stats().places_total > 0,
            most_read=int(self._settings.held * self._planes.num_blocks),
        )
        try:
            self._live = open_live_file(self.address)
            try:
                self._links = Links(
                    Identity(
                        boot=boot,
                        address=self.address,
                        role=TransferRole(self._settings.role).value,
                        connector=self._connector.name,
                        block_size=layout.block_size,
                        tp_size=layout.tp_size,
                        rank=options.rank,
                        planes=layout.num_planes,
                        draft_layers=layout.num_draft_layers,
                        lookahead_tokens=options.lookahead_tokens,
                        record_bytes=layout.record_bytes,
                        fingerprint=agreed_fingerprint(layout),
                        machine=machine_id(),
                        live=self._live.live,
                        memory=self._connector.memory,
                        peer_tp_size=self._sharing.layout.tp_size,
                        peer_fingerprint=agreed_fingerprint(self._sharing.layout),
                    ),
                    key=None if self._settings.key is None else self._settings.key.get_secret_value(),
                )
            except BaseException:
                self._live.close()
                raise
        except BaseException:
            self._connector.close()
            raise
        self._sends = Sends(
            self._planes, self._settings, self._sharing, self.groups, self._tally, self._links.incoming
        )
        self._shares = PlaceShares(self._connector, self._planes.layout, self._settings.rings[0])
        joins = self._planes.gpu is None  # a GPU checks one part while it reads the next
        self._publishers = [
            Publisher(self._connector, self._shares, side, self._sends.slots_of, pieces, joins=joins)
            for side, pieces in zip(self._sends.side.sides, self._sharing.readers, strict=True)
        ]
        self._fetches = PeerFetches(
            self._planes, self._settings, self._sharing, self._decode, self._links, self._tally
        )
        self._links.poller.register(self._wakeup, zmq.POLLIN)

    def _step(self) -> None:
        """Wait for something to do, and do it."""
        for descriptor, _ in self._links.poller.poll(self._patience()):
            if descriptor == self._wakeup:
                os.eventfd_read(self._wakeup)
        now = time.monotonic()
        self._run_commands(now)
        self._links.tick(now)
        for data in self._notifications():
            self._links.take(data, now)
        self._take_links(now)
        self._sends.take_computed()
        self._settle()  # a read within a node may have ended when it has begun
        self._take_reads()
        self._sends.side.tick(now)
        self._decode.tick(now)
        self._fetches.expire(now)
        self._settle()
        for publisher in self._publishers:
            while publisher.publish_next():  # announced at once: decode reads one while the next is packed
                self._settle()
        if self._sums:
            self._sums.popleft()()
            self._settle()

    def _take_reads(self) -> None:
        ends = self._connector.poll()
        if isinstance(self._connector, Stager):
            self._decode.reads_arrived(self._connector.take_arrived())
        for end in ends:
            self._decode.read_ended(end.read_id, None if end.outcome is ReadOutcome.OK else end.error)

    def _run_commands(self, now: float) -> None:
        commands = self._commands
        for _ in range(len(commands)):
            commands.popleft()(now)

    def _patience(self) -> int:
        if self._sums:
            return 0
        if self._connector.needs_polling or (self._fetches and isinstance(self._connector, Notifier)):
            return _POLLING_MS
        if self._sends.awaits_events:
            return _POLLING_MS
        return _IDLE_MS if self._sends.is_idle and not self._fetches else _BUSY_MS

    def _take_links(self, now: float) -> None:
        events = self._links.receive(now)
        for boot in events.reconnected:
            self._decode.repeat(boot)
        for boot in events.unheard:
            self._fetches.ask_again(self._decode.take_unanswered(boot), now)
        for boot, reason in events.gone:
            logger.info("transfer peer %s: %s", boot.hex()[:8], reason)
            self._sends.side.peer_gone(boot)
            self._decode.peer_gone(boot, reason)
            self._connector.disconnect(boot)
        self._fetches.lost(events.lost, now)
        for link in events.refused:
            self._fetches.refused(link, link.error)
        for link in events.accepted:
            assert link.identity is not None
            if (problem := self._prepare_reads(link.identity)) is not None:
                self._links.refuse(link, problem, now)
                self._fetches.refused(link, problem)
            self._fetches.accepted(link, now)
        for peer in events.greeted:
            self._sends.side.greet(
                peer.boot, (peer.rank - self._sharing.first_reader) % len(self._sends.side.sides)
            )
            if isinstance(self._connector, Notifier):
                try:
                    self._connector.listen(peer.boot, peer.memory)
                except Exception:  # its messages then go through the links
                    logger.exception("transfer peer %s: its memory cannot be read", peer.boot.hex()[:8])
        for each in events.received:
            if each.peer in self._links.incoming:
                self._sends.side.receive(each.peer, each.message, now)  # type: ignore[arg-type]
            else:
                self._decode.receive(each.peer, each.message, now)  # type: ignore[arg-type]

    def _prepare_reads(self, peer: Identity) -> str | None:
        """Prepare reads from a peer, if this rank reads from it; return why that is not possible."""
        if peer.rank not in self._sharing.joints:
            return None
        try:
            return self._connector.connect(peer.boot, peer.memory, self._sharing.joints[peer.rank])
        except Exception as error:
            logger.exception("transfer peer %s: its memory cannot be read", peer.boot.hex()[:8])
            return f"memory: {type(error).__name__}: {error}"

    # --- fetches ----------------------------------------------------------------------------------------------

    def _begin_fetch(self, task: PeerTask, handover: HandoverTask, after: Event | None, now: float) -> None:
        self._fetches.begin(task, handover, after, now)

    def _connect(self, address: str, now: float) -> None:
        self._fetches.connect_early(address, now)

    def _cancel(self, plan_id: int, now: float) -> None:
        if plan_id in self._sends:
            self._sends.side.cancel(plan_id, "prefill has given up the request")
        else:
            self._fetches.cancel(plan_id)

    # --- effects ----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Carry out what the state machines ask for."""
        while True:
            effects: list[tuple[int, prefill.Effect | decode.Effect]] = [*self._sends.side.take_effects()]
            effects += [(0, effect) for effect in self._decode.take_effects()]
            if not effects:
                return
            for reader, effect in effects:
                self._carry_out(reader, effect)

    def _carry_out(self, reader: int, effect: prefill.Effect | decode.Effect) -> None:
        match effect:
            case SendMessage():
                if isinstance(effect.message, BlocksGranted):
                    self._sends.granted(effect.message.transfer)
                self._answer(effect)
            case PublishPart():
                self._publishers[reader].publish(effect)
            case ComputeSums():
                self._sums.append(partial(self._sends.sum_sources, reader, effect))
            case OfferEnded():
                self._sends.end(effect.plan_id, effect.end, effect.error, effect.peer, effect.blocks)
            case PlacesRead():
                self._shares.withdraw(effect.places)
            case BeginRead():
                self._connector.read(self._fetches.order(effect))
            case ComputeTargetSums():
                self._sums.append(partial(self._fetches.sum_targets, effect))
            case FetchEnded():
                self._fetches.end(effect)
            case _:
                self._links.to_prefill(effect.peer, effect.message)

    def _answer(self, effect: SendMessage) -> None:
        """Send a message to decode: by the connector, if it can, else by the links."""
        if isinstance(self._connector, Notifier):
            envelope = Envelope(self._links.mine.boot, effect.peer)
            if self._connector.notify(effect.peer, encode(envelope, effect.message)):
                return
        self._links.to_decode(effect.peer, effect.message)

    def _notifications(self) -> list[bytes]:
        return self._connector.notifications() if isinstance(self._connector, Notifier) else []

    def _end_all(self, reason: str) -> None:
        """Tell the peers, wait for the reads in flight that end by themselves, and fail what is left.

        Slots into which a read may still write are held until ``close``.
        """
        with self._lock:
            self._ended = reason
        try:
            self._run_commands(0.0)
            self._sends.cancel_all(reason)
            self._fetches.cancel_all(reason)
            self._settle()
        except Exception:
            logger.exception("peers may not know that hand-overs have ended")
        self._connector.close()
        try:
            self._take_reads()
            self._settle()
        except Exception:
            logger.exception("slots of reads that have ended may be held")
        self._sends.drop_all(reason)
        self._fetches.drop_all(reason, read=False)

    # --- views ------------------------------------------------------------------------------------------------

    def _make_stats(self, now: float) -> TransferStats:
        peers = [
            PeerView("fetch", link.address, link.boot.hex(), link.state.value, link.error)
            for link in self._links.outgoing.values()
        ]
        peers += [
            PeerView("send", each.identity.address, boot.hex(), LinkState.ACCEPTED.value)
            for boot, each in self._links.incoming.items()
        ]
        transfers = (*self._fetches.views(), *self._sends.views())
        counts = self._tally.counts()
        return TransferStats(
            rank=self._options.rank,
            role=TransferRole(self._settings.role).value,
            address=self.address,
            connector=self._connector.stats(),
            peers=tuple(peers),
            transfers=transfers,
            counts=tuple(counts),
            sent_blocks_held=self._sends.side.blocks_held,
            fetched_blocks_in_flight=self._decode.blocks_in_flight,
            held_blocks=self._decode.blocks_held,
            leases_expired=sum(each.transfers for each in counts if each.is_expired_lease),
            protocol_errors=self._links.protocol_errors,
        )
