"""The hand-overs of one rank: one thread that owns the sockets, the connector and both state machines."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import zmq

from fdcache.devices.base import Event
from fdcache.errors import DeviceError, TransferError
from fdcache.layout import KVLayout
from fdcache.metadata import PeerTask, SwapPurpose
from fdcache.service.wire.address import default_runtime_dir, make_runtime_dir
from fdcache.service.wire.liveness import LiveFile, live_processes
from fdcache.settings.peers import PeerSettings, TransferRole
from fdcache.transfer import decode, prefill
from fdcache.transfer.connector import LocalPlanes, ReadOrder, ReadOutcome, TransferContext
from fdcache.transfer.decode import BeginRead, ComputeTargetSums, DecodeSide, Fetch, FetchEnd, FetchEnded
from fdcache.transfer.execution import TransferExecution
from fdcache.transfer.factory import open_connector
from fdcache.transfer.links import Links, LinkState, Outgoing, machine_id, rank_address
from fdcache.transfer.messages import Identity
from fdcache.transfer.prefill import (
    ComputeSums,
    Offer,
    OfferEnded,
    Part,
    PlacesRead,
    PrefillSide,
    SendMessage,
)
from fdcache.transfer.statistics import PeerView, TransferStats, TransferTally, TransferView

logger = logging.getLogger(__name__)

_IDLE_MS = 200
_BUSY_MS = 20
_POLLING_MS = 1
_START_SECONDS = 30.0
_MOST_UNWANTED = 1024


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """Parameters of an endpoint. Without ``verifies`` blocks are used as they arrive, for tests that must see it."""

    settings: PeerSettings
    rank: int
    lookahead_tokens: int = 0
    verifies: bool = True
    groups: tuple[tuple[int, int], ...] = ()
    """Ranges of layers that are announced together."""


@dataclass(slots=True)
class _Ready:
    """A part that is computed once ``event`` is reached."""

    plan_id: int
    part: Part
    event: Event | None


@dataclass(slots=True)
class _Sending:
    """A send: what was marked as computed, by group."""

    execution: TransferExecution
    task: PeerTask
    marked: list[int]


@dataclass(slots=True)
class _Fetching:
    execution: TransferExecution
    task: PeerTask
    deadline: float
    address: str
    after: Event | None
    boot: bytes = b""


@dataclass(slots=True)
class _Queues:
    commands: deque[Callable[[float], None]] = field(default_factory=deque)
    parts: deque[_Ready] = field(default_factory=deque)


class TransferEndpoint:
    """Sends and fetches of one rank, from their plan to their report.

    ``submit`` and the other calls may come from any thread and return at once. Raises ``TransferError`` if the
    connector or the address cannot be used.
    """

    def __init__(self, planes: LocalPlanes, options: EndpointOptions) -> None:
        self._planes, self._options = planes, options
        self._settings = settings = options.settings
        layout = planes.layout
        self._first_plane = _first_planes(layout)
        self._groups = options.groups or ((0, layout.total_layers),)
        self._group_ending_at = {last - 1: index for index, (_, last) in enumerate(self._groups)}
        self.address = rank_address(settings.address, options.rank)
        self._decode = DecodeSide(
            layout.num_planes, lease=settings.lease, renew=settings.renew, verifies=options.verifies
        )
        self._prefill = PrefillSide()
        self._queues = _Queues()
        self._sends: dict[int, _Sending] = {}
        self._send_of: dict[str, int] = {}
        self._fetches: dict[int, _Fetching] = {}
        self._unwanted: dict[str, deque[tuple[str, int]]] = {}
        """Transfers given up before their peer has answered, to tell it once it does."""
        self._tally = TransferTally()
        self._expired = 0
        self._lock = threading.Lock()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
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

    def submit(self, task: PeerTask, after: Event | None = None) -> TransferExecution:
        """Begin a hand-over; its execution ends once nothing accesses its slots any more.

        ``after``: on a GPU, the work that computes blocks of a send, or still uses slots of a fetch.
        """
        execution = TransferExecution(task, self._options.rank, partial(self.cancel, task.plan_id))
        if task.swap.purpose is SwapPurpose.SEND:
            with self._lock:
                self._sends[task.plan_id] = _Sending(execution, task, [0] * len(self._groups))
                self._send_of[task.transfer] = task.plan_id
            self._command(partial(self._offer, task))
            if task.computed:
                for _, last in self._groups:
                    self.layer_computed(last - 1, {task.transfer: task.computed}, lambda: after)
        else:
            self._command(partial(self._fetch, task, execution, after))
        return execution

    def refuse(self, task: PeerTask, reason: str) -> TransferExecution:
        """Return the execution of a hand-over that cannot begin."""
        execution = TransferExecution(task, self._options.rank, lambda: None)
        execution.finish(0, (), 0, reason)
        return execution

    def cancel(self, plan_id: int) -> None:
        """End a hand-over that is not needed any more, and tell the peer."""
        self._command(partial(self._cancel, plan_id))

    def layer_computed(
        self, layer: int, computed: Mapping[str, int], record: Callable[[], Event | None] | None = None
    ) -> None:
        """Mark a layer of the leading blocks of some transfers as computed, once the event of ``record`` is reached."""
        group = self._group_ending_at.get(layer)
        if group is None:
            return
        event: Event | None = None
        first_layer, last_layer = self._groups[group]
        planes = (self._first_plane[first_layer], self._first_plane[last_layer])
        parts = []
        with self._lock:
            for transfer, blocks in computed.items():
                plan_id = self._send_of.get(transfer)
                if plan_id is None:
                    continue
                send = self._sends[plan_id]
                start, stop = send.marked[group], min(blocks, len(send.task.swap))
                if start < stop:
                    send.marked[group] = stop
                    parts.append((plan_id, Part(start, stop, *planes)))
        if parts and record is not None:
            event = record()
        for plan_id, part in parts:
            self._queues.parts.append(_Ready(plan_id, part, event))
        if parts:
            self._wake()

    def stats(self) -> TransferStats:
        """Return a snapshot, made by the thread of the endpoint."""
        answer: list[TransferStats] = []
        ready = threading.Event()

        def make(now: float) -> None:
            answer.append(self._make_stats(now))
            ready.set()

        self._command(make)
        if not ready.wait(5.0):
            raise TransferError("the thread of the hand-overs does not answer")
        return answer[0]

    def close(self) -> None:
        """End every hand-over, tell the peers, and release everything. Idempotent."""
        if self._thread.is_alive():
            self._closing = True
            self._wake()
            self._thread.join()
        if self._wakeup >= 0:
            os.close(self._wakeup)
            self._wakeup = -1

    def _command(self, command: Callable[[float], None]) -> None:
        self._queues.commands.append(command)
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
        try:
            while not self._closing:
                self._step()
            self._end_all("the instance is shut down")
        except Exception as error:
            logger.exception("hand-overs have failed")
            self._end_all(f"{type(error).__name__}: {error}")
        finally:
            self._connector.close()
            self._links.close()
            self._live.close()

    def _open(self) -> None:
        options, layout = self._options, self._planes.layout
        boot = uuid.uuid4().bytes
        context = TransferContext(self._planes, self._settings, boot, self._wake)
        self._connector = open_connector(context)
        try:
            directory = _live_directory(self.address)
            deque(live_processes(directory), maxlen=0)  # removes the files of dead ones
            self._live = LiveFile(directory)
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
                        fingerprint=layout.fingerprint,
                        machine=machine_id(),
                        live=self._live.live,
                        memory=self._connector.memory,
                    )
                )
            except BaseException:
                self._live.close()
                raise
        except BaseException:
            self._connector.close()
            raise
        self._links.poller.register(self._wakeup, zmq.POLLIN)

    def _step(self) -> None:
        """Wait for something to do, and do it."""
        for descriptor, _ in self._links.poller.poll(self._patience()):
            if descriptor == self._wakeup:
                os.eventfd_read(self._wakeup)
        now = time.monotonic()
        commands = self._queues.commands
        for _ in range(len(commands)):
            commands.popleft()(now)
        self._links.tick(now)
        self._take_links(now)
        self._publish()
        for end in self._connector.poll():
            self._decode.read_ended(end.read_id, None if end.outcome is ReadOutcome.OK else end.error)
        self._prefill.tick(now)
        self._decode.tick(now)
        self._expire_unconnected(now)
        self._settle()

    def _patience(self) -> int:
        if self._connector.needs_polling or any(each.event is not None for each in self._queues.parts):
            return _POLLING_MS
        return _BUSY_MS if self._sends or self._fetches or self._queues.parts else _IDLE_MS

    def _take_links(self, now: float) -> None:
        events = self._links.receive(now)
        for boot, reason in events.gone:
            logger.info("transfer peer %s: %s", boot.hex()[:8], reason)
            self._prefill.peer_gone(boot)
            self._decode.peer_gone(boot, reason)
            self._connector.disconnect(boot)
        for link in events.refused:
            self._refuse_waiting(link, FetchEnd.REFUSED, link.error)
        for link in events.accepted:
            assert link.identity is not None
            if (problem := self._connector.connect(link.boot, link.identity.memory)) is not None:
                self._refuse_waiting(link, FetchEnd.REFUSED, problem)
            for fetching in self._waiting_for(link.address):
                self._ask(fetching, link.boot, now)
            for transfer, attempt in self._unwanted.pop(link.address, ()):
                self._decode.decline(link.boot, transfer, attempt)
        for each in events.received:
            if each.peer in self._links.incoming:
                self._prefill.receive(each.peer, each.message, now)  # type: ignore[arg-type]
            else:
                self._decode.receive(each.peer, each.message, now)  # type: ignore[arg-type]

    # --- sends ------------------------------------------------------------------------------------------------

    def _offer(self, task: PeerTask, now: float) -> None:
        swap = task.swap
        if TransferRole(self._settings.role) is TransferRole.DECODE:
            self._end_send(
                task.plan_id, prefill.SendEnd.FAILED, "FDCACHE_TRANSFER_ROLE=decode hands nothing over"
            )
            return
        offer = Offer(
            task.plan_id,
            task.transfer,
            swap.hash_values,
            swap.src_block_ids,
            self._planes.layout.num_planes,
            task.timeout,
        )
        self._prefill.offer(offer, now)

    def _publish(self) -> None:
        """Announce the parts that are computed, in order, as far as the connector has room."""
        parts = self._queues.parts
        for _ in range(len(parts)):
            ready = parts.popleft()
            if ready.plan_id not in self._sends:
                continue
            if not self._prefill.is_live(ready.plan_id):  # its offer is among the commands
                parts.append(ready)
                continue
            if ready.event is not None and not ready.event.query():
                parts.append(ready)
                continue
            part = ready.part
            most = self._connector.most_blocks(part.first_plane, part.last_plane)
            head = part._replace(last=min(part.last, part.first + most))
            slots = self._sends[ready.plan_id].task.swap.src_block_ids[head.first : head.last]
            places = self._connector.publish(slots, part.first_plane, part.last_plane)
            if places is None:
                parts.append(ready)
                continue
            self._prefill.computed(ready.plan_id, head, places)
            if head.last < part.last:
                parts.append(_Ready(ready.plan_id, part._replace(first=head.last), None))

    def _end_send(
        self, plan_id: int, end: prefill.SendEnd, error: str | None, to: bytes | None = None
    ) -> None:
        with self._lock:
            send = self._sends.pop(plan_id)
            if self._send_of.get(send.task.transfer) == plan_id:
                del self._send_of[send.task.transfer]
        self._expired += end is prefill.SendEnd.EXPIRED
        blocks = len(send.task.swap)
        whole = blocks if end is prefill.SendEnd.DONE else 0
        send.execution.finish(whole, (), 0, error)
        peer = self._links.incoming.get(to) if to is not None else None
        address = "" if peer is None else peer.identity.address
        self._tally.add("send", address, end.value, blocks, 0, 0.0, send.execution.age)

    # --- fetches ----------------------------------------------------------------------------------------------

    def _fetch(self, task: PeerTask, execution: TransferExecution, after: Event | None, now: float) -> None:
        rank = self._options.rank
        if TransferRole(self._settings.role) is TransferRole.PREFILL:
            execution.finish(0, (), 0, "FDCACHE_TRANSFER_ROLE=prefill reads from nobody")
            return
        if rank >= len(task.addresses):
            execution.finish(
                0, (), 0, f"{len(task.addresses)} addresses of the peer, and none for rank {rank}"
            )
            return
        fetching = _Fetching(execution, task, now + task.timeout, task.addresses[rank], after)
        self._fetches[task.plan_id] = fetching
        try:
            link = self._links.connect(fetching.address, now, fetching.deadline)
        except TransferError as error:
            self._end_unasked(task.plan_id, FetchEnd.REFUSED, str(error))
            return
        if link.state is LinkState.ACCEPTED:
            self._ask(fetching, link.boot, now)
        elif link.state is LinkState.REFUSED:
            self._end_unasked(task.plan_id, FetchEnd.REFUSED, link.error)

    def _ask(self, fetching: _Fetching, boot: bytes, now: float) -> None:
        task = fetching.task
        fetching.boot = boot
        if not task.wanted:
            self._decode.decline(boot, task.transfer, task.attempt)
            self._end_unasked(task.plan_id, FetchEnd.DONE, None)
            return
        swap = task.swap
        first = int(swap.src_block_ids[0]) if len(swap) else 0
        timeout = max(fetching.deadline - now, 0.0)
        fetch = Fetch(
            task.plan_id,
            boot,
            task.transfer,
            task.attempt,
            first,
            swap.hash_values,
            swap.dst_block_ids,
            timeout,
        )
        self._decode.fetch(fetch, now)

    def _waiting_for(self, address: str) -> list[_Fetching]:
        return [each for each in self._fetches.values() if not each.boot and each.address == address]

    def _refuse_waiting(self, link: Outgoing, end: FetchEnd, error: str | None) -> None:
        for fetching in self._waiting_for(link.address):
            self._end_unasked(fetching.task.plan_id, end, error)

    def _expire_unconnected(self, now: float) -> None:
        for plan_id, fetching in list(self._fetches.items()):
            if not fetching.boot and now > fetching.deadline:
                self._end_unasked(plan_id, FetchEnd.TIMEOUT, f"no peer answers at {fetching.address}")

    def _end_unasked(self, plan_id: int, end: FetchEnd, error: str | None) -> None:
        """Report a fetch of which nothing was read."""
        self._end_fetch(FetchEnded(plan_id, end, 0, (), error))

    def _end_fetch(self, effect: FetchEnded) -> None:
        fetching = self._fetches.pop(effect.plan_id)
        execution, swap = fetching.execution, fetching.task.swap
        moved = effect.whole * self._planes.layout.payload_bytes
        execution.finish(effect.whole, effect.corrupt, moved, effect.error)
        waited = execution.waited
        self._tally.add(
            "fetch", fetching.address, effect.end.value, len(swap), moved, waited, execution.age - waited
        )

    def _cancel(self, plan_id: int, now: float) -> None:
        if plan_id in self._sends:
            self._prefill.cancel(plan_id, "prefill has given up the request")
        elif (fetching := self._fetches.get(plan_id)) is not None:
            if fetching.boot:
                self._decode.cancel(plan_id)
            elif fetching.task.wanted:
                unwanted = self._unwanted.setdefault(fetching.address, deque(maxlen=_MOST_UNWANTED))
                unwanted.append((fetching.task.transfer, fetching.task.attempt))
                self._end_unasked(plan_id, FetchEnd.CANCELLED, "cancelled")

    # --- effects ----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Carry out what the state machines ask for."""
        while effects := [*self._prefill.take_effects(), *self._decode.take_effects()]:
            for effect in effects:
                self._carry_out(effect)

    def _carry_out(self, effect: prefill.Effect | decode.Effect) -> None:
        match effect:
            case SendMessage():
                self._links.to_decode(effect.peer, effect.message)
            case ComputeSums():
                self._sum_sources(effect)
            case OfferEnded():
                for places in effect.places:
                    self._connector.withdraw(places)
                self._end_send(effect.plan_id, effect.end, effect.error, effect.peer)
            case PlacesRead():
                self._connector.withdraw(effect.places)
            case BeginRead():
                self._begin_read(effect)
            case ComputeTargetSums():
                self._sum_targets(effect)
            case FetchEnded():
                self._end_fetch(effect)
            case _:
                self._links.to_prefill(effect.peer, effect.message)

    def _sum_sources(self, effect: ComputeSums) -> None:
        try:
            self._prefill.sums(effect.plan_id, self._planes.sums(effect.slots))
        except DeviceError as error:
            self._prefill.cancel(effect.plan_id, str(error))

    def _sum_targets(self, effect: ComputeTargetSums) -> None:
        try:
            sums = self._planes.sums(effect.slots)
        except DeviceError as error:
            self._decode.cancel(effect.plan_id, str(error))
            sums = np.empty(0, np.uint64)  # not compared: the fetch has ended
        self._decode.sums(effect.plan_id, sums)

    def _begin_read(self, effect: BeginRead) -> None:
        ready, after = effect.ready, None
        for fetching in self._fetches.values():
            if fetching.task.transfer == ready.transfer and fetching.boot == effect.peer:
                fetching.execution.begin()
                after = fetching.after
        self._connector.read(
            ReadOrder(
                effect.read_id,
                effect.peer,
                ready.places,
                ready.count,
                effect.skip,
                ready.first_plane,
                ready.last_plane,
                effect.slots,
                after,
            )
        )

    def _end_all(self, reason: str) -> None:
        """Tell the peers, wait for the reads in flight that end by themselves, and fail what is left."""
        for plan_id in list(self._sends):
            self._prefill.cancel(plan_id, reason)
        for plan_id in list(self._fetches):
            self._cancel(plan_id, 0.0)
        self._settle()
        self._connector.close()
        for end in self._connector.poll():
            self._decode.read_ended(end.read_id, reason)
        self._settle()
        for plan_id in list(self._sends):
            self._end_send(plan_id, prefill.SendEnd.CANCELLED, reason)
        for plan_id in list(self._fetches):
            self._end_unasked(plan_id, FetchEnd.CANCELLED, reason)
        for command in self._queues.commands:
            command(0.0)

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
        transfers = [
            TransferView(
                plan_id, "fetch", each.task.transfer, each.address, len(each.task.swap), each.execution.age
            )
            for plan_id, each in self._fetches.items()
        ]
        transfers += [
            TransferView(
                plan_id,
                "send",
                each.task.transfer,
                "",
                len(each.task.swap),
                each.execution.age,
                self._prefill.is_complete(plan_id),
            )
            for plan_id, each in self._sends.items()
        ]
        return TransferStats(
            rank=self._options.rank,
            role=TransferRole(self._settings.role).value,
            address=self.address,
            connector=self._connector.stats(),
            peers=tuple(peers),
            transfers=tuple(transfers),
            counts=self._tally.counts(),
            sent_blocks_held=self._prefill.blocks_held,
            fetched_blocks_in_flight=self._decode.blocks_in_flight,
            held_blocks=self._decode.blocks_held,
            leases_expired=self._expired,
            protocol_errors=self._links.protocol_errors,
        )


def _live_directory(address: str) -> Path:
    """Return the directory of the live file: that of the socket, or the user's own."""
    if address.startswith("ipc://"):
        directory = Path(address.removeprefix("ipc://")).parent
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory
    directory = default_runtime_dir()
    make_runtime_dir(directory)
    return directory


def _first_planes(layout: KVLayout) -> Sequence[int]:
    """Return the number of the first plane of each layer, then the number of planes."""
    counts = [len(layout.layer_planes(layer)) for layer in range(layout.total_layers)]
    return [sum(counts[:layer]) for layer in range(layout.total_layers + 1)]
