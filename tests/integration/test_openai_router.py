"""The router over HTTP, between engines that answer as vLLM does and note what they were asked."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from examples import openai_router
from examples.openai_router import make_app
from tests.service_help import until

_PARAMETERS = "kv_transfer_params"


class Served:
    """An application at a port of this machine, in a thread."""

    def __init__(self, app: FastAPI, port: int = 0) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(("127.0.0.1", port))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))
        self.thread.start()
        until(lambda: self.server.started, "a server")

    def close(self) -> None:
        """End it. Idempotent."""
        self.server.should_exit = True
        self.thread.join()
        self.socket.close()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StandIn:
    """An engine: what it was asked, and the status with which it answers."""

    def __init__(self, name: str) -> None:
        self.name, self.status, self.slow = name, 200, 0.0
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.app = FastAPI()
        self.app.get("/health")(self.health)
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/completions")(self.complete)

    async def health(self) -> Response:
        """Answer that it is healthy."""
        return Response()

    async def models(self, request: Request) -> Response:
        """Answer with the own name to who has the key."""
        if request.headers.get("Authorization") != "Bearer key":
            return Response(status_code=401)
        return JSONResponse({"served_by": self.name})

    async def complete(self, request: Request) -> Response:
        """Answer as prefill or decode, by what is asked."""
        body = await request.json()
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        await asyncio.sleep(self.slow)
        if self.status != 200:
            return JSONResponse({"error": self.name}, self.status)
        parameters = body.get("kv_transfer_params") or {}
        if parameters.get("do_remote_decode"):
            handed_over = {
                "do_remote_prefill": True,
                "remote_addresses": [self.name],
                "remote_engine_id": self.name,
            }
            return JSONResponse({"kv_transfer_params": handed_over})
        if not body.get("stream"):
            return JSONResponse({"by": self.name, "from": parameters.get("remote_engine_id")})

        async def pieces() -> AsyncIterator[str]:
            for number in range(3):
                yield f"data: {json.dumps(number)}\n\n"
                await asyncio.sleep(0.01)

        return StreamingResponse(pieces(), media_type="text/event-stream")


class Deployment:
    """Two engines of each role, and a router."""

    def __init__(self, stack: ExitStack, *, at_once: bool = False, count: int = 2) -> None:
        self.prefill, self.decode = ([StandIn(f"{role}{n}") for n in range(count)] for role in "pd")
        self.served = {
            each.name: stack.enter_context(Served(each.app)) for each in (*self.prefill, *self.decode)
        }
        urls = [[self.served[each.name].url for each in of_role] for of_role in (self.prefill, self.decode)]
        self.router = stack.enter_context(Served(make_app(*urls, at_once=at_once)))
        self.client = stack.enter_context(httpx.Client(base_url=self.router.url, timeout=60.0))

    def ask(self, **fields: Any) -> httpx.Response:
        """Ask for a completion."""
        body = {"model": "m", "prompt": "x", "max_tokens": 9, **fields}
        return self.client.post("/v1/completions", json=body, headers={"Authorization": "Bearer key"})

    def state(self, name: str) -> dict[str, Any]:
        """Return what the router knows of an engine."""
        engines = self.client.get("/engines").json()
        found: dict[str, Any] = next(each for each in engines if each["url"] == self.served[name].url)
        return found


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    monkeypatch.setattr(openai_router, "_CHECK_SECONDS", 0.05)
    with ExitStack() as stack:
        yield Deployment(stack)


def test_both_are_asked_at_once_where_prefill_has_told_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_router, "_CHECK_SECONDS", 0.05)
    with ExitStack() as stack:
        deployed = Deployment(stack, at_once=True, count=1)
        prefill, decode = deployed.prefill[0], deployed.decode[0]
        prefill.slow = 0.3
        assert deployed.ask().json()["from"] == "p0"
        assert decode.asked[0]["kv_transfer_params"]["remote_engine_id"] == "p0"
        assert deployed.ask().json()["from"] is None  # it has answered before prefill
        waits = decode.asked[1]["kv_transfer_params"]
        assert waits["do_remote_prefill"] is True
        assert waits["remote_addresses"] == ["p0"]
        until(lambda: len(prefill.asked) == 2, "prefill to be asked")
        assert prefill.asked[1]["kv_transfer_params"]["transfer_id"] == waits["transfer_id"]
        prefill.status = 500
        assert deployed.ask().status_code == 200
        until(lambda: deployed.state("p0")["addresses"] is None, "the router to notice a failure")


def test_decode_waits_at_the_engine_that_computes_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests at once, which two prefill engines share."""
    monkeypatch.setattr(openai_router, "_CHECK_SECONDS", 0.05)
    with ExitStack() as stack:
        deployed = Deployment(stack, at_once=True)
        for each in deployed.prefill:
            each.slow = 0.2
        with ThreadPoolExecutor(12) as pool:
            until(
                lambda: (
                    [deployed.state(each.name)["addresses"] for each in deployed.prefill] == [["p0"], ["p1"]]
                    or list(pool.map(lambda _: deployed.ask(), range(2))) is None
                ),
                "both to have told their addresses",
            )
            for each in (*deployed.prefill, *deployed.decode):
                each.asked.clear()
            assert [each.status_code for each in pool.map(lambda _: deployed.ask(), range(12))] == [200] * 12
        waits = [each[_PARAMETERS] for decode in deployed.decode for each in decode.asked]
        until(lambda: sum(len(each.asked) for each in deployed.prefill) == 12, "prefill to be asked")
        computes = {
            asked[_PARAMETERS]["transfer_id"]: each.name for each in deployed.prefill for asked in each.asked
        }
        assert {each["transfer_id"]: each["remote_addresses"][0] for each in waits} == computes
        assert set(computes.values()) == {"p0", "p1"}


def test_a_client_cannot_say_whom_decode_reads_from(deployed: Deployment) -> None:
    for each in deployed.prefill:
        each.status = 500
    told = {"do_remote_prefill": True, "remote_addresses": ["tcp://x:1"], "remote_request_id": "y"}
    assert deployed.ask(kv_transfer_params={**told, "transfer_id": "z", "mine": 1}).status_code == 200
    (asked,) = [asked for decode in deployed.decode for asked in decode.asked]
    assert asked[_PARAMETERS] == {"mine": 1}


@pytest.mark.parametrize("body", ["no JSON", "[1]", '{"prompt": "x", "kv_transfer_params": [1]}'])
def test_a_body_that_is_no_request_is_refused(deployed: Deployment, body: str) -> None:
    answer = deployed.client.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert "body" in answer.json()["detail"]


def test_prefill_answers_with_a_token_and_decode_with_its_parameters(deployed: Deployment) -> None:
    answer = deployed.ask(min_tokens=4, n=2).json()
    (prefill,) = [each for each in deployed.prefill if each.asked]
    (decode,) = [each for each in deployed.decode if each.asked]
    assert answer == {"by": decode.name, "from": prefill.name}
    assert prefill.asked[0]["max_tokens"] == 1
    assert not {"stream", "min_tokens", "n"} & prefill.asked[0].keys()
    assert (decode.asked[0]["max_tokens"], decode.asked[0]["min_tokens"]) == (9, 4)
    assert decode.asked[0]["kv_transfer_params"]["remote_addresses"] == ["p0"]
    assert prefill.headers[0]["authorization"] == decode.headers[0]["authorization"] == "Bearer key"
    assert prefill.headers[0]["x-request-id"] == decode.headers[0]["x-request-id"]


def test_a_stream_is_passed_on(deployed: Deployment) -> None:
    answer = deployed.ask(stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
    until(
        lambda: not any(deployed.state(name)["in_flight"] for name in deployed.served), "the end of requests"
    )


def test_engines_that_fail_cost_no_request_and_come_back(deployed: Deployment) -> None:
    deployed.prefill[0].status = 500
    deployed.served["d0"].close()
    assert [deployed.ask().json() for _ in range(3)] == [{"by": "d1", "from": "p1"}] * 3
    deployed.prefill[1].status = 500
    assert deployed.ask().json() == {"by": "d1", "from": None}, "decode computes the prompt"
    deployed.prefill[0].status = deployed.prefill[1].status = 200
    until(lambda: deployed.state("p0")["is_up"] and deployed.state("p1")["is_up"], "healthy engines")
    assert deployed.ask().json()["from"] in ("p0", "p1")
    with Served(deployed.decode[0].app, deployed.served["d0"].port):
        until(lambda: deployed.state("d0")["is_up"], "an engine that was started again")
        deployed.served["d1"].close()
        assert deployed.ask().json()["by"] == "d0"
        assert deployed.client.get("/health").status_code == 200
    until(lambda: deployed.ask().status_code == 503, "no decode engine")
    assert deployed.client.get("/health").status_code == 503


def test_a_wrong_request_is_for_no_other_engine(deployed: Deployment) -> None:
    for each in deployed.prefill:
        each.status = 400
    answer = deployed.ask()
    assert answer.status_code == 400
    assert answer.json()["error"] in ("p0", "p1")
    assert sum(len(each.asked) for each in deployed.prefill) == 1
    assert not any(each.asked for each in deployed.decode)


def test_an_engine_that_is_drained_gets_no_requests(deployed: Deployment) -> None:
    for name in ("p0", "d1"):
        drained = deployed.client.post("/engines/drain", params={"url": deployed.served[name].url})
        assert [each["is_usable"] for each in drained.json()] == [False]
    assert [deployed.ask().json() for _ in range(3)] == [{"by": "d0", "from": "p1"}] * 3
    deployed.client.post("/engines/resume", params={"url": deployed.served["d1"].url})
    deployed.client.post("/engines/drain", params={"url": deployed.served["d0"].url})
    assert deployed.ask().json()["by"] == "d1"
    assert deployed.client.post("/engines/drain", params={"url": "http://nobody"}).status_code == 404
    assert deployed.client.post("/engines/other", params={"url": "http://nobody"}).status_code == 404


def test_parameters_that_are_null_are_none(deployed: Deployment) -> None:
    answer = deployed.ask(kv_transfer_params=None)
    assert answer.status_code == 200
    assert answer.json()["from"] in ("p0", "p1")


def test_models_are_those_of_an_engine_that_answers(deployed: Deployment) -> None:
    headers = {"Authorization": "Bearer key"}
    deployed.served["d0"].close()
    for _ in range(2):
        assert deployed.client.get("/v1/models", headers=headers).json() == {"served_by": "d1"}
    assert deployed.client.get("/v1/models").status_code == 401


def test_an_engine_of_both_roles_is_drained_in_both() -> None:
    both = StandIn("b")
    with ExitStack() as stack:
        url = stack.enter_context(Served(both.app)).url
        router = stack.enter_context(Served(make_app([url], [url])))
        client = stack.enter_context(httpx.Client(base_url=router.url, timeout=60.0))
        drained = client.post("/engines/drain", params={"url": url}).json()
        assert [(each["role"], each["is_usable"]) for each in drained] == [
            ("prefill", False),
            ("decode", False),
        ]
        assert client.get("/health").status_code == 503


@pytest.mark.parametrize("url", ["http://[::1", "127.0.0.1:8000", "ftp://a", "http://"])
def test_what_is_no_address_of_an_engine_is_refused_at_the_start(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        openai_router.main(["--prefill", "http://a:1", "--decode", url])
    assert ended.value.code == 2
    assert "write http://host:port" in capsys.readouterr().err
