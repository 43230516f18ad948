"""Hand-overs of FastDeploy's roles prefill and decode, driven by FastDeploy's own protocol.

Prefill asks decode for room before it computes a request, and sends it the first token afterwards. The addresses of
prefill's ranks travel with the first message, in ``disaggregate_info``. Decode fetches the blocks when the first token
has come, and computes the tokens after the last full block with the step that FastDeploy makes for the first token.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from fdcache.errors import ConfigurationError, RequestStateError
from fdcache.integrations.fastdeploy.config import MIXED, role_of
from fdcache.integrations.fastdeploy.manager import FastDeployManager
from fdcache.manager.requests import PeerSource, Request
from fdcache.manager.results import LoadOutcome, LoadStatus
from fdcache.settings import Settings
from fdcache.transfer.handovers import Handovers

logger = logging.getLogger(__name__)

_ADDRESSES = "fdcache_addresses"
"""Key of ``disaggregate_info`` for the addresses of prefill's ranks."""


def has_role(config: Any) -> bool:
    """Return True for an instance that either prefills or decodes."""
    return role_of(config) != MIXED


@dataclass(slots=True, eq=False)
class Arrival:
    """A request whose first token, in ``output``, has come to decode.

    ``computed``: how many of its tokens have KV, once that is known. ``asks``: its blocks are to be fetched.
    """

    request: Any
    output: Any
    has_begun: bool = False
    computed: int | None = None
    asks: bool = True


class Splitwise:
    """The hand-overs of one scheduler. ``lock``: the one of its manager."""

    def __init__(
        self, manager: FastDeployManager, handovers: Handovers, lock: AbstractContextManager[object]
    ) -> None:
        self.addresses: dict[int, str] = {}
        """Addresses at which peers reach the ranks."""
        self.stopping: set[int] = set()
        """Slots of the batch whose requests were preempted, and for which workers may still sample."""
        self.sees_tokens = False
        """Tokens come in messages that name their slots (``FD_USE_GET_SAVE_OUTPUT_V1``)."""
        self._manager = manager
        self._handovers = handovers
        self._lock = lock
        self._num_ranks = manager.core.layout.tp_size
        self._arrivals: dict[str, Arrival] = {}
        self._added: list[str] = []
        self._sent: list[tuple[str, str]] = []

    @classmethod
    def of(
        cls, manager: FastDeployManager, config: Any, settings: Settings, lock: AbstractContextManager[object]
    ) -> Splitwise | None:
        """Return those of a manager, None without FDCACHE_TRANSFER.

        Raises ``ConfigurationError`` for a transfer without a role.
        """
        handovers = Handovers.from_settings(manager.core, settings)
        if handovers is None:
            return None
        if not has_role(config):
            name = "FDCACHE_TRANSFER"
            raise ConfigurationError(
                f"{name}={settings.render(name)} ({settings.place(name)}), but splitwise_role is {MIXED}, which hands "
                f"nothing over: start with --splitwise-role prefill or decode, or unset {name}"
            )
        return cls(manager, handovers, lock)

    # --- prefill ------------------------------------------------------------------------------------------

    def offer(self, request: Any) -> None:
        """Name the own ranks to decode in a request that it will be asked for room for."""
        info = request.disaggregate_info
        if info is not None and len(self.addresses) == self._num_ranks:
            info[_ADDRESSES] = [self.addresses[rank] for rank in range(self._num_ranks)]

    def prefilled(self, request: Any) -> None:
        """Hand over the blocks of a request that has its first token, which FastDeploy may send now."""
        name = request.request_id
        try:
            self._manager.send_computed(request, lambda sent: self._send(sent, name))
        except RequestStateError as error:
            logger.warning("the blocks of request %s are not handed over: %s", name, error)
        with self._lock:
            self._sent.append((name, "finished"))

    def _send(self, request: Request, name: str) -> None:
        self._handovers.send([(request, name)], is_computed=True)

    def take_cache_info(self, infos: list[dict[str, Any]]) -> None:
        """Take the place of FastDeploy's messenger, which workers of this manager do not start."""
        with self._lock:
            self._added += [info["request_id"] for info in infos if "src_block_ids" in info]

    def take_added(self) -> list[str]:
        """Return the requests that the messenger has been told of since the last call."""
        with self._lock:
            added, self._added = self._added, []
            return added

    def take_sent(self) -> list[tuple[str, str]]:
        """Return the requests whose blocks may be read, each with FastDeploy's word for that."""
        with self._lock:
            sent, self._sent = self._sent, []
            return sent

    # --- decode -------------------------------------------------------------------------------------------

    def first_token(self, request: Any, output: Any) -> None:
        """Take a request whose first token has come; ``take_ready`` returns it."""
        with self._lock:
            self._arrivals[request.request_id] = Arrival(request, output)

    def take_outcome(self, outcome: LoadOutcome) -> bool:
        """Take the end of a fetch, or return False if it is that of another load. Call it under the lock."""
        arrival = self._arrivals.get(outcome.request_id)
        if arrival is None or not arrival.has_begun:
            return False
        if outcome.status is LoadStatus.OVERDUE:  # a rank may still write into the blocks
            arrival.has_begun = arrival.asks = False
        else:
            arrival.computed = outcome.recompute_from
        if outcome.status is not LoadStatus.CONFIRMED:
            logger.warning(
                "request %s is computed from token %d on: %s",
                outcome.request_id,
                outcome.recompute_from,
                outcome.error_message,
            )
        return True

    def forget(self, name: str) -> None:
        """Drop a request that has ended."""
        with self._lock:
            self._arrivals.pop(name, None)

    def take_ready(self) -> list[Arrival]:
        """Fetch the blocks of arrivals; return those that have what there is. Their block table may be a new one."""
        with self._lock:
            for arrival in self._arrivals.values():
                if not arrival.has_begun and (not arrival.asks or self._handovers.fetch_room):
                    self._begin(arrival)
            ready = [each for each in self._arrivals.values() if each.computed is not None]
            for each in ready:
                del self._arrivals[each.request.request_id]
                self._manager.take_first_token(each.request, each.output.outputs.token_ids[0])
            return ready

    def _begin(self, arrival: Arrival) -> None:
        request, name = arrival.request, arrival.request.request_id
        addresses = (request.disaggregate_info or {}).get(_ADDRESSES) if arrival.asks else None

        def fetch(matched: Request) -> None:
            if addresses:
                self._handovers.fetch([(matched, PeerSource(name, tuple(addresses)))])

        table = self._manager.allocate_anew(request, len(request.block_tables), fetch)
        if table is None:
            return
        arrival.has_begun = True
        request.block_tables = table
        request.disaggregate_info["block_tables"] = table
        arrival.computed = self._manager.cached_tokens(request)
