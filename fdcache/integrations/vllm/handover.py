"""Prefill and decode in two engines: the request parameters of vLLM's own protocol, which routers pass on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from fdcache.errors import RequestStateError
from fdcache.integrations.vllm.tables import RequestTable
from fdcache.manager import Request
from fdcache.manager.requests import PeerSource
from fdcache.metadata import Int32Array, PeerTask
from fdcache.settings.peers import TransferRole
from fdcache.transfer.engine_handovers import EngineHandovers, EngineSend

logger = logging.getLogger(__name__)

ADDRESSES = "remote_addresses"
"""Parameter with the address of each rank of the prefill instance: routers pass on what they do not know."""

ASKED_OF_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Parameters with which a router asks a prefill engine to hand over what it computes."""

_SHORTENED = "_p_side_truncated"
TRANSFER_ID = "transfer_id"
"""Parameter with a name that a router gives to a hand-over, so that it can ask both engines at once."""

_WHOLE = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")


class HandoverNotes(Protocol):
    """What the ranks are told of hand-overs with a step; see ``StepMetadata``."""

    computed: list[tuple[int, int, Int32Array]]
    sends: dict[int, str]
    sends_over: Sequence[int]


@dataclass(slots=True)
class _Ahead:
    """A hand-over whose blocks go to decode step by step; the ranks know the first ``blocks``, of ``tokens`` tokens.

    ``is_given_up``: its request was preempted or has to compute something again.
    """

    send: EngineSend
    blocks: int = 0
    tokens: int = 0
    is_given_up: bool = False


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What an engine tells of itself."""

    engine_id: str
    tp_size: int
    pp_size: int


class PeerSide:
    """What a prefill engine returns for its requests, and what a decode engine fetches for its own.

    ``addresses``: of the own ranks, from their handshake.
    """

    def __init__(self, handovers: EngineHandovers, identity: EngineIdentity) -> None:
        self._handovers = handovers
        self._identity = identity
        self._addresses: dict[int, str] = {}
        self._strange = 0
        self._requests: dict[str, str] = {}
        """Requests whose hand-over has a name of a router, until it is planned."""
        self._ahead: dict[str, _Ahead] = {}

    def learn_addresses(self, addresses: Mapping[int, str]) -> None:
        """Take the addresses at which ranks answer peers."""
        self._addresses |= addresses

    def arrived(self, source: Any, request: Request) -> None:
        """Take note of the prefill engine that has computed a request, if its parameters name one."""
        params = source.kv_transfer_params
        if not isinstance(params, dict) or not params.get("do_remote_prefill"):
            return
        if self._handovers.role is TransferRole.PREFILL:
            return
        addresses, transfer = params.get(ADDRESSES), params.get("remote_request_id")
        is_ahead = transfer is None and TRANSFER_ID in params
        if is_ahead:
            transfer = params[TRANSFER_ID]
        is_named = isinstance(addresses, list) and all(isinstance(each, str) for each in addresses)
        if not (is_named and addresses and isinstance(transfer, str)):
            self._strange += 1
            if self._strange.bit_count() == 1:
                logger.warning(
                    "kv_transfer_params of request %s name no engine with FdcacheConnector (%s, remote_request_id): "
                    "its prompt is computed, as of %d such requests",
                    source.request_id,
                    ADDRESSES,
                    self._strange,
                )
            return
        self._handovers.fetch(request, PeerSource(transfer, tuple(addresses), is_ahead=is_ahead))

    def shorten(self, source: Any) -> None:
        """Leave the last token of a prompt that is to be handed over to decode, where no layer can go back by one.

        As ``NixlConnector`` does, under the same mark: a request may pass through both.
        """
        params, left = source.kv_transfer_params, self._handovers.tokens_left
        if not (left and self._is_asked_for(params)) or params.get(_SHORTENED):
            return
        if source.prompt_token_ids is None or source.num_prompt_tokens <= left:
            return
        if not source.skip_reading_prefix_cache:
            del source.prompt_token_ids[-left:], source._all_token_ids[-left:]
            source.num_prompt_tokens -= left
            source.max_tokens = 1
            params[_SHORTENED] = True

    def _is_asked_for(self, params: object) -> bool:
        """Return True if a router asks this engine to hand over what it computes."""
        is_asked = isinstance(params, dict) and bool(params.get("do_remote_decode"))
        return is_asked and self._handovers.role is not TransferRole.DECODE

    # --- blocks that go to decode step by step, if it may be asked at once --------------------------------------

    def scheduled(self, source: Any, request: Request, start: int) -> None:
        """Begin to hand over a request that a step computes from this token on, if its router has named the hand-over.

        Decode may wait for it then. One that has to compute something again is handed over at its end, if at all.
        """
        known, num_tokens = self._ahead.get(source.request_id), source.num_prompt_tokens
        if known is not None:
            if start < known.tokens:
                self._give_up(known)
            return
        params, handovers = source.kv_transfer_params, self._handovers
        if not self._is_asked_for(params) or not self._addresses or handovers.tokens_left:
            return
        name = params.get(TRANSFER_ID)
        if (
            not (isinstance(name, str) and name)
            or not handovers.least_tokens < num_tokens <= request.num_tokens
        ):
            return
        # Another has the name; if it still has at the end, a log line says so.
        with suppress(RequestStateError):
            self._ahead[source.request_id] = _Ahead(handovers.send_ahead(request, name, num_tokens))

    def preempted(self, request_id: str) -> None:
        """End the hand-over of a request whose blocks vLLM has taken back."""
        if (known := self._ahead.get(request_id)) is not None:
            self._give_up(known)

    def _give_up(self, known: _Ahead) -> None:
        if not known.is_given_up:
            known.is_given_up = True
            self._handovers.end(known.send.request)

    def computed(self, source: Any, table: RequestTable, num_tokens: int, step: HandoverNotes) -> None:
        """Tell the ranks of the blocks that a request has with the end of a step."""
        known = self._ahead.get(source.request_id)
        if known is None or known.is_given_up or not known.send.number:
            return
        is_whole, page = num_tokens >= source.num_prompt_tokens, self._handovers.least_tokens
        stop = len(known.send.hashes) if is_whole else num_tokens // page
        known.tokens = max(known.tokens, min(num_tokens, source.num_prompt_tokens))
        if known.blocks < stop <= table.num_pages:
            step.computed.append((known.send.number, known.blocks, table.page_ids(known.blocks, stop)))
            known.blocks = stop

    def tell(self, step: HandoverNotes) -> None:
        """Tell the ranks which hand-overs have ended without that vLLM waits for them."""
        if over := self._handovers.take_over():
            step.sends_over = over

    def planned(self, task: PeerTask, step: HandoverNotes) -> None:
        """Tell the ranks which request a hand-over is of, if vLLM waits for its end."""
        if (request_id := self._requests.pop(task.transfer, None)) is not None:
            step.sends[task.plan_id] = request_id

    def finished(
        self, source: Any, request: Request, table: RequestTable, step: HandoverNotes
    ) -> tuple[dict[str, Any] | None, bool]:
        """Hand over the prompt of a request that has ended; return the parameters for decode, and if vLLM keeps blocks.

        None if nothing is handed over: the router did not ask for it, or the request was aborted.
        """
        known, is_sent = self._ahead.get(source.request_id), self._is_to_be_sent(source)
        if known is not None and known.send.number and is_sent and not known.is_given_up:
            send, name = known.send, known.send.transfer
            self.computed(source, table, source.num_prompt_tokens, step)
            send.is_awaited = is_kept = not send.is_over
            if is_kept:
                step.sends[send.number] = source.request_id
            del self._ahead[source.request_id]
            return self._parameters(source, table, name), is_kept
        self.forget(source.request_id)
        if not is_sent or (known is not None and known.send.was_asked):  # decode was told, and computes it
            return None, False
        if (sent := self._send(source, request, table)) is None:
            return None, False
        return self._parameters(source, table, sent), True

    def forget(self, request_id: str) -> None:
        """End what was handed over of a request before its end."""
        self.preempted(request_id)
        self._ahead.pop(request_id, None)

    def _is_to_be_sent(self, source: Any) -> bool:
        """Return True for a request whose prompt is computed, and wanted by a router."""
        params, num_tokens = source.kv_transfer_params, source.num_prompt_tokens
        if not self._is_asked_for(params) or not self._addresses:
            return False
        is_whole = source.status.name in _WHOLE and source.num_computed_tokens >= num_tokens
        if self._handovers.tokens_left:
            is_whole &= source.num_computed_tokens == num_tokens and bool(params.get(_SHORTENED))
        return is_whole and bool(num_tokens > self._handovers.least_tokens)

    def _send(self, source: Any, request: Request, table: RequestTable) -> str | None:
        """Hand over what a request has computed; return the name under which decode asks for it."""
        name, num_tokens = source.kv_transfer_params.get(TRANSFER_ID), source.num_prompt_tokens
        name = name if isinstance(name, str) and name else source.request_id
        try:
            if not self._handovers.send(request, name, num_tokens, table.path_ids(num_tokens)):
                return None
        except RequestStateError as error:
            logger.warning("request %s is not handed over: %s", source.request_id, error)
            return None
        self._requests[name] = source.request_id
        return str(name)

    def _parameters(self, source: Any, table: RequestTable, name: str) -> dict[str, Any]:
        """Return the parameters with which decode asks for a hand-over."""
        num_tokens = source.num_prompt_tokens
        own, addresses = self._identity, [self._addresses[rank] for rank in sorted(self._addresses)]
        host, port = _host_and_port(addresses[0])
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": table.by_group(num_tokens),
            "remote_engine_id": own.engine_id,
            "remote_request_id": name,
            "remote_host": host,
            "remote_port": port,
            "remote_num_tokens": num_tokens,
            "tp_size": own.tp_size,
            "pp_size": own.pp_size,
            "dcp_size": 1,
            "transfer_mode": "pull",
            ADDRESSES: addresses,
        }


def _host_and_port(address: str) -> tuple[str, int]:
    """Return what routers log of an address; a socket of this machine has no port."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    return (host, int(port)) if scheme == "tcp" else ("localhost", 0)
