"""Prefill and decode in two engines: the request parameters of vLLM's own protocol, which routers pass on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fdcache.errors import RequestStateError
from fdcache.integrations.vllm.tables import RequestTable
from fdcache.manager import Request
from fdcache.manager.requests import PeerSource
from fdcache.settings.peers import TransferRole
from fdcache.transfer.engine_handovers import EngineHandovers

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

    def finished(self, source: Any, request: Request, table: RequestTable) -> dict[str, Any] | None:
        """Hand over the prompt of a request that has ended; return the parameters for the decode engine.

        None if nothing is handed over: the router did not ask for it, or the request was aborted.
        """
        params, num_tokens = source.kv_transfer_params, source.num_prompt_tokens
        if not self._is_asked_for(params) or not self._addresses:
            return None
        is_whole = source.status.name in _WHOLE and source.num_computed_tokens >= num_tokens
        if self._handovers.tokens_left:
            is_whole &= source.num_computed_tokens == num_tokens and bool(params.get(_SHORTENED))
        if not is_whole or num_tokens <= self._handovers.least_tokens:
            return None
        name = params.get(TRANSFER_ID)
        name = name if isinstance(name, str) and name else source.request_id
        try:
            if not self._handovers.send(request, name, num_tokens, table.path_ids(num_tokens)):
                return None
        except RequestStateError as error:  # a router that gives two hand-overs one name
            logger.warning("request %s is not handed over: %s", source.request_id, error)
            return None
        self._requests[name] = source.request_id
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

    def request_of(self, transfer: str) -> str:
        """Return the id of the request whose hand-over is planned."""
        return self._requests.pop(transfer, transfer)


def _host_and_port(address: str) -> tuple[str, int]:
    """Return what routers log of an address; a socket of this machine has no port."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    return (host, int(port)) if scheme == "tcp" else ("localhost", 0)
