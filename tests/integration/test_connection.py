"""Client of a tool, in threads and in an event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fdcache.errors import RefusedError, ServiceUnavailableError
from fdcache.service.client import AsyncClient, Client
from tests.service_help import local_service


def test_concurrent_questions_get_their_own_answers(tmp_path: Path) -> None:
    async def ask_all(address: str) -> None:
        async with AsyncClient(Client(address, timeout=60)) as client:
            answers = await asyncio.gather(
                *(client.ask(view) for view in ("stats", "clients", "integrity") * 8)
            )
            assert [type(each) for each in answers] == [dict, list, list] * 8
            await client.ask("pause")
            assert (await client.ask("stats"))["state"] == "paused"
            await client.ask("resume")
            with pytest.raises(RefusedError):
                await client.ask("nothing of the kind")

    with local_service(tmp_path) as service:
        asyncio.run(ask_all(service.address))


def test_the_event_loop_is_not_blocked_without_a_service(tmp_path: Path) -> None:
    async def ask() -> int:
        turns = 0
        async with AsyncClient(Client(f"ipc://{tmp_path}/none.sock", timeout=0.2)) as client:
            question = asyncio.ensure_future(client.ask("stats"))
            while not question.done():
                turns += 1
                await asyncio.sleep(0)
            with pytest.raises(ServiceUnavailableError, match="fdcache serve"):
                await question
        return turns

    assert asyncio.run(ask()) > 1


def test_a_closed_client_says_so(tmp_path: Path) -> None:
    with local_service(tmp_path) as service:
        client = Client(service.address)
        client.close()
        client.close()
        with pytest.raises(ServiceUnavailableError, match="closed"):
            client.ask("stats")
