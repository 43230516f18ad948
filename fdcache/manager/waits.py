"""Waits: how long requests wait for blocks that are read from storage for them, by this process or a service."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fdcache.manager.cost import Cached
from fdcache.manager.keyed import OffloadRequest
from fdcache.manager.load_choices import LoadChoices
from fdcache.metadata import HashArray
from fdcache.tiers.fetches import OnDevice
from fdcache.tiers.host import HostTier, Reading
from fdcache.tiers.statistics import ReadTotals
from fdcache.tiers.waiting_fetches import Wait


class Waits:
    """Decides what is read for requests, and ends their waits once they are sooner done without.

    ::

        wait = waits.before_look_up(request, number, hashes, on_device)  # reads of this process
        if wait is None and isinstance(found := look_up(), Reading):
            wait = waits.answered(request, number, num_on_device, found)  # reads of a service

    This process knows its reads before a look-up. A service tells with each look-up how far a read has come. How fast
    its storage is for this engine follows from the reads that were waited for, their queue included, and from those
    that were late; without any, as when nothing is worth reading, from all reads of the service.
    """

    def __init__(self, choices: LoadChoices, clock: Callable[[], float], host: HostTier | None) -> None:
        self._choices = choices
        self._clock = clock
        self._fetches = host.fetches if host is not None else None
        self._table = host.fetch_table if host is not None else None
        self._service = host.service if host is not None else None
        self._before: ReadTotals | None = None
        self._waits: dict[str, tuple[float, Wait]] = {}  # for a service, with the time when each began

    def judge_of(self, request: OffloadRequest) -> RequestReads | None:
        """Return the judge of a request's reads; None if all is read.

        While speeds are unknown it reads all, too; the wait for a read may outlast that.
        """
        return RequestReads(self, self._choices, request) if self._choices.is_auto else None

    def begin(self, request: OffloadRequest, number: int, hashes: HashArray, on_device: OnDevice) -> None:
        """Begin to read what is stored of the path of a request that has arrived."""
        if self._fetches is not None:
            self._fetches.begin(number, hashes, on_device, self.judge_of(request))

    def before_look_up(
        self, request: OffloadRequest, number: int, hashes: HashArray, on_device: OnDevice
    ) -> Wait | None:
        """Return what a request waits for of this process's reads, or None; they begin if they have not."""
        if self._table is None:
            return None
        wait = self._table.wait(number, hashes, on_device, self.judge_of(request))
        if wait is None or not wait.ends or self._is_worth(request, wait):
            return wait
        self._table.go_on(number)
        return None

    def answered(self, request: OffloadRequest, number: int, on_device: int, reading: Reading) -> Wait | None:
        """Return what a request that has ``on_device`` blocks waits for of a service's reads, or None.

        A read that is not worth it is taken back; one that has become too slow still fills the host tier.
        """
        arrived, stop, now = reading.arrived, reading.stop, self._clock()
        known = self._waits.get(request.request_id)
        if stop <= arrived or (known is None and stop <= on_device):  # not known yet
            first = 0 if known is None else known[1].first
            return Wait(first, arrived, stop, now, is_last=reading.is_last)
        if known is None:
            began, wait = now, Wait(arrived, arrived, stop, now)
            waits, keep = self._is_begun_well(request, on_device, arrived, stop)
            self._choices.asked(request.request_id)
        else:
            began, wait = known
            if arrived > wait.arrived:
                wait = replace(wait, arrived=arrived, since=now)
            wait = replace(wait, stop=max(wait.stop, stop))
            judged = replace(wait, arrived=arrived, ends=(stop,), on_device=on_device)
            waits, keep = self._is_worth(request, judged), True
        self._waits[request.request_id] = began, wait
        if waits:
            return replace(wait, arrived=arrived, stop=stop, is_last=reading.is_last)
        del self._waits[request.request_id]
        if self._fetches is not None:
            self._fetches.leave(number, keep=keep)
        return None

    def _is_begun_well(
        self, request: OffloadRequest, on_device: int, arrived: int, stop: int
    ) -> tuple[bool, bool]:
        """Return True if a request waits for a service's read that has begun, and True if the read is kept.

        It is kept if it is worth it, or if its speed is worth knowing.
        """
        if (judge := self.judge_of(request)) is None:
            return True, True
        worth, waits = judge.worth_reading(on_device, arrived, stop, 0)
        return waits and worth > arrived, worth > arrived

    def _is_worth(self, request: OffloadRequest, wait: Wait) -> bool:
        return not self._choices.is_auto or self._choices.is_worth_waiting(request, wait)

    def found(self, request: OffloadRequest, arrived: int) -> None:
        """Note that a request was looked up: it waits no longer. ``arrived`` blocks of its path have come.

        Others may not, as they were waited for too long or could not be read.
        """
        if (known := self._waits.pop(request.request_id, None)) is not None:
            began, wait = known
            blocks, seconds = wait.stop - wait.first, self._clock() - began
            self._choices.observe_read(blocks, seconds, has_ended=arrived >= wait.stop)

    def forget(self, request: OffloadRequest) -> None:
        """Forget a request that has ended."""
        self._waits.pop(request.request_id, None)

    def observe_service(self) -> None:
        """Observe the reads of the service since the last call."""
        now, before = self._service.reads if self._service is not None else None, self._before
        self._before = now
        if now is not None and before is not None and now.reads > before.reads:
            self._choices.observe_others(now.since(before))


@dataclass(slots=True)
class RequestReads:
    """Judge of one request's reads from storage: a ``ReadJudge`` of ``fdcache.tiers.waiting_fetches``."""

    waits: Waits
    choices: LoadChoices
    request: OffloadRequest
    on_device: int = 0

    def worth_reading(self, on_device: int, first: int, stop: int, ahead: int) -> tuple[int, bool]:
        """Return up to which block to read, and True if the request is to wait for it."""
        worth = self._worth(on_device, first, stop, ahead)
        if worth > max(first, on_device):
            return worth, True
        return (stop, False) if self.choices.takes_probe() else (first, False)

    def worth_joining(self, on_device: int, first: int, stop: int) -> int:
        """Return up to which of the blocks that others read the request waits for them."""
        worth = self._worth(on_device, first, stop, 0)
        return worth if worth > max(first, on_device) else first

    def _worth(self, on_device: int, first: int, stop: int, ahead: int) -> int:
        """Return up to which block a read is worth it."""
        self.on_device = on_device
        if not self.choices.decides_reads:
            return stop
        self.waits.observe_service()
        needed = max(first, on_device)  # the host has to have those before them too
        cached = Cached(
            self.request.num_tokens,
            on_device,
            needed - on_device,
            stop - needed,
            reads_ahead=ahead + needed - first,
            loads_ahead=self.choices.loads_ahead,
        )
        return self.choices.decide_read(self.request, cached)
