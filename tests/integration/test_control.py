"""Control of a running service: pins, reads ahead, moves, deletions and quotas; in Python, by HTTP and by commands."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from fdcache.errors import ConfigurationError, RefusedError
from fdcache.service.client.connection import Client
from fdcache.service.client.control import Control, Prefix
from fdcache.service.server.http import make_app
from tests.service_engine import BLOCK, PROMPT, Engine, assert_nothing_is_held
from tests.service_help import LocalService, local_service, run, until

KEY = "k" * 32
BEARER = {"Authorization": f"Bearer {KEY}"}
BLOCKS = len(PROMPT) // BLOCK
STORAGE = {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_SIZE": "16MiB"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalService, Engine]]:
    directory: Path = tmp_path_factory.mktemp("control")
    with local_service(directory, **STORAGE, FDCACHE_STORAGE_DIR=str(directory / "disk")) as service:
        engine = Engine(service.address, device_blocks=64)
        yield service, engine
        end_pins(service)
        engine.close()
        assert_nothing_is_held(service)


@pytest.fixture
def service(shared: tuple[LocalService, Engine]) -> LocalService:
    """A service whose host tier and storage have the blocks of PROMPT, and nothing else."""
    running, engine = shared
    end_pins(running)
    for tier in ("host", "storage"):  # an order to reset the device would come with a later heartbeat
        running.ask("reset", tier=tier)
    engine.manager.reset_cache()
    engine.await_stock()
    engine.serve(PROMPT)
    until(lambda: on_host(running) == BLOCKS, "the blocks are on the host")
    until(lambda: running.ask("storage")["blocks"] == BLOCKS, "the blocks are stored")
    return running


@pytest.fixture
def control(service: LocalService) -> Control:
    return Control(service.client)


def end_pins(service: LocalService) -> None:
    for pin in Control(service.client).pins():
        Control(service.client).unpin(pin.pin or 0)


def on_host(service: LocalService) -> int:
    return int(service.ask("stats")["tiers"]["host"]["ready"])


def evictable(service: LocalService) -> int:
    return int(service.ask("stats")["tiers"]["host"]["evictable"])


def tiers(control: Control, tokens: list[int] = PROMPT) -> list[str | None]:
    return [block.tier for block in control.explain(Prefix(tokens)).blocks]


PREFIX = Prefix(PROMPT)


class TestPins:
    def test_pinned_blocks_survive_the_flood_that_evicts_others(self, tmp_path: Path) -> None:
        with local_service(tmp_path, FDCACHE_HOST_MEMORY="1MiB") as service:
            engine, control = Engine(service.address, device_blocks=64), Control(service.client)
            engine.serve(PROMPT)
            engine.serve([7, *PROMPT])
            until(lambda: on_host(service) == 2 * BLOCKS, "the blocks are on the host")
            assert control.pin(PREFIX, 600).pinned == BLOCKS
            most = service.ask("namespaces")[0]["extents"]
            assert most
            starts = itertools.count(1000, 50)

            def has_left() -> bool:
                start = next(starts)
                engine.await_stock(BLOCKS)
                engine.serve([start + i for i in range(41)])
                return tiers(control, [7, *PROMPT])[-1] is None

            until(has_left, "a block that nothing pins has left")
            assert tiers(control) == ["host"] * BLOCKS
            engine.close()

    def test_a_pin_ends_with_its_time(self, service: LocalService, control: Control) -> None:
        pinned = control.pin(PREFIX, 1.0)
        assert (pinned.pinned, pinned.host, pinned.blocks) == (BLOCKS, BLOCKS, BLOCKS)
        assert evictable(service) == 0
        assert service.ask("integrity") == []
        until(lambda: not control.pins(), "the pin has ended")
        assert evictable(service) == BLOCKS

    def test_unpin_by_number_and_by_prefix(self, control: Control) -> None:
        first, second = control.pin(PREFIX, 60), control.pin(PREFIX, 60)
        shorter = control.pin(Prefix(PROMPT[:12]), 60)
        assert [each.pin for each in control.pins()] == [first.pin, second.pin, shorter.pin]
        assert control.unpin(first.pin or 0).pins == 1
        ended = control.unpin(PREFIX)
        assert (ended.pins, ended.blocks) == (1, BLOCKS)
        assert [each.pin for each in control.pins()] == [shorter.pin]
        assert control.unpin(99999).pins == 0

    def test_the_number_of_a_pin_ends_none_of_a_later_service(self, tmp_path: Path) -> None:
        variables = {"FDCACHE_DISCARD": "0"}
        former = LocalService(tmp_path, **variables)
        engine = Engine(former.address)
        engine.serve(PROMPT)
        until(lambda: on_host(former) == BLOCKS, "the blocks are on the host")
        with Client(former.address) as client:
            old = Control(client).pin(PREFIX, 60).pin
        former.crash()
        time.sleep(1.1)  # numbers begin at the second of the start
        with local_service(tmp_path, **variables) as service, Client(service.address) as client:
            new = Control(client).pin(PREFIX, 60)
            assert new.pinned == BLOCKS
            assert Control(client).unpin(old or 0).pins == 0
            assert [each.pin for each in Control(client).pins()] == [new.pin]
        engine.close()

    def test_a_pin_is_no_hit(self, service: LocalService, control: Control) -> None:
        before = [block.hits for block in control.explain(PREFIX).blocks]
        control.pin(PREFIX, 60)
        control.pin(PREFIX, 60)
        assert [block.hits for block in control.explain(PREFIX).blocks] == before

    def test_a_list_of_pins_tells_what_the_host_tier_has_now(self, control: Control) -> None:
        control.pin(PREFIX, 60, most_blocks=3)
        (pin,) = control.pins()
        assert (pin.blocks, pin.host, pin.pinned, pin.usable) == (BLOCKS, BLOCKS, 3, BLOCKS)
        control.delete(PREFIX, start=5)
        (pin,) = control.pins()
        assert (pin.host, pin.pinned) == (5, 3)

    def test_quotas_are_shares_of_one_whole(self, control: Control) -> None:
        (whole,) = (each.most_blocks for each in control.quotas() if each.tenant == "(none)")
        control.set_quota("half", 0.5)
        (half,) = (each.most_blocks for each in control.quotas() if each.tenant == "half")
        control.set_quota("half", 1.0)
        assert half == whole // 2

    def test_a_pin_takes_as_many_blocks_as_it_may(self, control: Control) -> None:
        assert control.pin(PREFIX, 60, most_blocks=3).pinned == 3

    def test_pins_hold_at_most_half_of_the_quota_of_a_tenant(
        self, shared: tuple[LocalService, Engine], service: LocalService, control: Control
    ) -> None:
        _, engine = shared
        engine.serve(PROMPT, tenant="small")
        until(lambda: on_host(service) == 2 * BLOCKS, "the blocks are on the host")
        (now,) = (each for each in control.quotas() if each.tenant != "(none)" and each.blocks)
        slots = now.most_blocks
        before = control.set_quota("small", 8 / slots)
        assert before.before == 1.0
        (now,) = (each for each in control.quotas() if each.tenant == "small")
        room = now.most_blocks // 2
        pin = control.pin(Prefix(PROMPT, tenant="small"), 60)
        assert (pin.pinned, pin.over_budget) == (room, BLOCKS - room)
        again = control.pin(Prefix(PROMPT, tenant="small"), 60)
        assert again.pinned == room, "blocks that are pinned already need no room"
        assert control.pin(PREFIX, 60).pinned == BLOCKS, "others have their own room"
        control.set_quota("small", 1.0)

    def test_a_quota_is_read_before_its_tenant_has_a_block(self, control: Control) -> None:
        control.set_quota("later", 0.125)
        (found,) = (each for each in control.quotas() if each.tenant == "later")
        assert (found.blocks, found.quota) == (0, 0.125)

    def test_a_reset_ends_the_pins_of_its_blocks(self, service: LocalService, control: Control) -> None:
        control.pin(PREFIX, 600)
        service.ask("reset", tier="host")
        until(lambda: not control.pins(), "the pin has ended")
        assert service.ask("integrity") == []

    def test_nothing_is_pinned_of_a_prefix_that_is_not_there(self, control: Control) -> None:
        found = control.pin(Prefix([5] * 40), 60)
        assert (found.pin, found.pinned, found.host) == (None, 0, 0)
        assert control.pins() == []


class TestTiers:
    def test_prefetch_brings_a_prefix_from_storage(self, service: LocalService, control: Control) -> None:
        service.ask("reset", tier="host")
        assert tiers(control) == ["storage"] * BLOCKS
        until(lambda: control.prefetch(PREFIX).done, "it is read")
        found = control.prefetch(PREFIX)
        assert (found.host, found.reading, found.done) == (BLOCKS, 0, True)
        assert tiers(control) == ["host"] * BLOCKS
        until(lambda: evictable(service) == BLOCKS, "nothing stays pinned")

    def test_local_storage_reads_from_no_other_node(self, control: Control) -> None:
        with pytest.raises(RefusedError, match="source: this storage is the node's own"):
            control.prefetch(PREFIX, "tcp://127.0.0.1:7400")

    def test_move_frees_the_host_tier(self, service: LocalService, control: Control) -> None:
        moved = control.move(PREFIX)
        assert (moved.stored, moved.freed, moved.kept, moved.done) == (BLOCKS, BLOCKS, 0, True)
        assert on_host(service) == 0
        assert tiers(control) == ["storage"] * BLOCKS

    def test_move_stores_what_the_write_policy_does_not(self, tmp_path: Path) -> None:
        with local_service(
            tmp_path,
            **STORAGE,
            FDCACHE_STORAGE_DIR=str(tmp_path / "disk"),
            FDCACHE_WRITE_POLICY="write_back",
        ) as service:
            engine, control = Engine(service.address), Control(service.client)
            engine.serve(PROMPT)
            until(lambda: on_host(service) == BLOCKS, "the blocks are on the host")
            until(lambda: service.ask("namespaces")[0]["storage"], "the storage is open")
            until(lambda: control.move(PREFIX).done, "they are stored")
            assert tiers(control) == ["storage"] * BLOCKS
            engine.close()

    def test_move_leaves_what_another_prompt_continues(
        self, shared: tuple[LocalService, Engine], service: LocalService, control: Control
    ) -> None:
        other = [*PROMPT[: 4 * BLOCK], *range(500, 521)]
        shared[1].serve(other)
        until(lambda: tiers(control, other) == ["host"] * 9, "the other prompt is on the host")
        until(lambda: control.move(PREFIX).done, "it is stored")
        assert tiers(control) == ["host"] * 4 + ["storage"] * (BLOCKS - 4)
        assert tiers(control, other) == ["host"] * 9

    def test_delete_removes_a_prefix_and_what_continues_it(
        self, service: LocalService, control: Control
    ) -> None:
        control.pin(PREFIX, 600)
        assert control.delete(PREFIX, dry_run=True).deleted_storage == BLOCKS
        first = control.delete(PREFIX, start=BLOCKS - 2)
        assert (first.deleted_host, first.deleted_storage) == (2, 2)
        assert tiers(control) == ["host"] * (BLOCKS - 2) + [None] * 2
        assert control.pins() == [], "a pin ends when its last block goes"
        rest = control.delete(Prefix(PROMPT[: 2 * BLOCK]))
        assert (rest.deleted_host, rest.deleted_storage) == (BLOCKS - 2, BLOCKS - 2)
        assert tiers(control) == [None] * BLOCKS
        assert on_host(service) == 0
        assert [block.reason for block in control.explain(PREFIX).blocks] == ["deleted"] * BLOCKS
        assert service.ask("integrity") == []

    def test_blocks_deleted_from_storage_alone_are_deleted_too(
        self, service: LocalService, control: Control
    ) -> None:
        until(lambda: control.move(PREFIX).done, "it is stored")
        assert control.delete(PREFIX).deleted_storage == BLOCKS
        assert [block.reason for block in control.explain(PREFIX).blocks] == ["deleted"] * BLOCKS

    def test_a_tenant_is_not_reached_by_the_tokens_of_another(
        self, shared: tuple[LocalService, Engine], service: LocalService, control: Control
    ) -> None:
        shared[1].serve(PROMPT, tenant="a")
        until(lambda: on_host(service) == 2 * BLOCKS, "the blocks are on the host")
        until(lambda: service.ask("storage")["blocks"] == 2 * BLOCKS, "the blocks are stored")
        assert control.delete(Prefix(PROMPT, tenant="b")).deleted_host == 0
        assert control.delete(PREFIX).deleted_host == BLOCKS
        found = control.explain(Prefix(PROMPT, tenant="a"))
        assert [block.tier for block in found.blocks] == ["host"] * BLOCKS


class TestErrors:
    def test_a_prefix_has_tokens_or_hashes(self, control: Control) -> None:
        with pytest.raises(ConfigurationError, match="tokens or hashes"):
            control.pin(Prefix(), 60)

    @pytest.mark.parametrize(
        ("what", "arguments", "words"),
        [
            ("pin", {"hashes": ["zz"]}, "hashes"),
            ("pin", {"hashes": []}, "full block"),
            ("pin", {"hashes": ["00" * 32], "seconds": -1}, "seconds"),
            ("pin", {"hashes": ["00" * 32], "seconds": 0}, "seconds: give more than 0"),
            ("pin", {"hashes": ["00" * 32], "most_blocks": 2.5}, "most_blocks: 2.5 is not a whole number"),
            ("unpin", {"pin": 1.5}, "pin: 1.5 is not a whole number"),
            ("unpin", {"pin": 1, "hashes": ["00" * 32]}, "pin: give a pin or a prefix, not both"),
            ("delete", {"hashes": ["00" * 32], "start": "x"}, "start"),
            ("quota", {"tenant": "a", "share": 2}, "share"),
            ("quota", {"share": 0.5}, "tenant"),
            ("quota", {"tenant": "(none)", "share": 0.5}, "stands for blocks without a tenant"),
        ],
    )
    def test_a_bad_argument_is_named(
        self, service: LocalService, what: str, arguments: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(RefusedError, match=words):
            service.ask(what, **arguments)

    @pytest.mark.parametrize("what", ["prefetch", "move"])
    def test_a_service_without_storage_says_so(self, tmp_path: Path, what: str) -> None:
        with local_service(tmp_path) as service:
            engine = Engine(service.address)
            with pytest.raises(RefusedError, match="storage: the service has none; FDCACHE_STORAGE"):
                getattr(Control(service.client), what)(PREFIX)
            engine.close()


class TestHttp:
    @pytest.fixture
    def web(self, service: LocalService) -> Iterator[TestClient]:
        with TestClient(make_app(service.address, (), own_key=KEY), headers=BEARER) as client:
            yield client

    def test_every_command_answers_what_it_did(self, web: TestClient, control: Control) -> None:
        prompt = {"tokens": PROMPT}
        pin = web.post("/v1/pin", json={**prompt, "seconds": 60}).json()
        assert (pin["pinned"], pin["blocks"]) == (BLOCKS, BLOCKS)
        assert [each["pin"] for each in web.get("/v1/pins").json()] == [pin["pin"]]
        assert web.post("/v1/unpin", json={"pin": pin["pin"]}).json() == {"pins": 1, "blocks": BLOCKS}
        assert web.post("/v1/unpin", json=prompt).json() == {"pins": 0, "blocks": 0}
        until(lambda: web.post("/v1/move", json=prompt).json()["done"], "it is stored")
        found = web.post("/v1/explain", json=prompt).json()
        assert [block["tier"] for block in found["blocks"]] == ["storage"] * BLOCKS
        hashes = [block["hash"] for block in found["blocks"]]
        until(lambda: web.post("/v1/prefetch", json={"hashes": hashes}).json()["done"], "it is read")
        assert tiers(control) == ["host"] * BLOCKS
        assert web.post("/v1/delete", json={"hashes": hashes}).json()["deleted_host"] == BLOCKS
        assert web.post("/v1/quotas", json={"tenant": "t", "share": 0.5}).json()["before"] == 1.0
        quotas = {each["tenant"]: each["quota"] for each in web.get("/v1/quotas").json()}
        assert (quotas["(none)"], quotas["t"]) == (1.0, 0.5)
        web.post("/v1/quotas", json={"tenant": "t", "share": 1})

    @pytest.mark.parametrize("path", ["pin", "unpin", "prefetch", "move", "delete", "quotas"])
    def test_commands_need_a_key(self, service: LocalService, path: str) -> None:
        with TestClient(make_app(service.address, (), own_key=KEY)) as web:
            assert web.post(f"/v1/{path}", json={}).status_code == 401
            assert web.post(f"/v1/{path}", json={}, headers=BEARER).status_code in (409, 422)

    def test_a_prefix_is_given_in_one_way(self, web: TestClient) -> None:
        both = {"tokens": [1], "hashes": ["00" * 32]}
        assert web.post("/v1/pin", json=both).status_code == 409
        assert web.post("/v1/pin", json={}).status_code == 409
        assert web.post("/v1/unpin", json={"pin": 1, "tokens": [1]}).status_code == 409

    @pytest.mark.parametrize(
        ("path", "body", "field"),
        [
            ("pin", {"tokens": ["1"] * 20}, "tokens"),
            ("pin", {"tokens": [True] * 20}, "tokens"),
            ("pin", {"tokens": [1.5] * 20}, "tokens"),
            ("pin", {"tokens": PROMPT, "most_blocks": True}, "most_blocks"),
            ("pin", {"tokens": PROMPT, "seconds": 0}, "seconds"),
            ("pin", {"tokens": PROMPT, "seconds": "60"}, "seconds"),
            ("unpin", {"pin": "5"}, "pin"),
            ("delete", {"tokens": PROMPT, "dry_run": "yes"}, "dry_run"),
            ("quotas", {"tenant": "a", "share": "0.5"}, "share"),
            ("reset", {"older_than": "5"}, "older_than"),
        ],
    )
    def test_a_malformed_question_is_422_and_names_the_field(
        self, web: TestClient, path: str, body: dict[str, Any], field: str
    ) -> None:
        answer = web.post(f"/v1/{path}", json=body)
        assert answer.status_code == 422, answer.text
        assert all(field in each["loc"] for each in answer.json()["detail"]), answer.text

    @pytest.mark.parametrize(
        ("path", "body", "words"),
        [
            ("pin", {"tokens": [1]}, "tokens or hashes: give at least one full block"),
            ("prefetch", {"tokens": []}, "tokens or hashes: give at least one full block"),
            ("pin", {"hashes": ["00" * 32] * 2}, "hashes: one is given twice"),
        ],
    )
    def test_what_is_no_prefix_is_409_and_names_the_field(
        self, web: TestClient, path: str, body: dict[str, Any], words: str
    ) -> None:
        answer = web.post(f"/v1/{path}", json=body)
        assert answer.status_code == 409, answer.text
        assert answer.json()["detail"].startswith(words)

    def test_a_missing_storage_is_404_and_named(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service:
            engine = Engine(service.address)
            with TestClient(make_app(service.address, (), own_key=KEY), headers=BEARER) as web:
                answer = web.post("/v1/prefetch", json={"tokens": PROMPT})
            assert (answer.status_code, answer.json()["detail"][:8]) == (404, "storage:")
            engine.close()

    def test_nothing_is_loaded_from_elsewhere(self, web: TestClient) -> None:
        assert web.get("/docs").status_code == web.get("/redoc").status_code == 404
        assert web.get("/openapi.json").status_code == 200

    def test_an_unknown_namespace_is_404(self, web: TestClient, service: LocalService) -> None:
        name = service.ask("namespaces")[0]["namespace"]
        other = "0" * 16 if name[0] != "0" else "f" * 16
        for about in ({"tokens": PROMPT}, {"hashes": ["00" * 32]}):
            assert web.post("/v1/pin", json={**about, "namespace": other}).status_code == 404


class TestCommands:
    @pytest.fixture
    def prompt(self, tmp_path: Path) -> Path:
        path = tmp_path / "prompt.txt"
        path.write_text(json.dumps(PROMPT))
        return path

    def test_every_command_says_what_it_did(self, service: LocalService, prompt: Path) -> None:
        def told(*words: object) -> str:
            done = run(words[0], *words[1:], "--server", service.address)
            assert done.returncode == 0, done
            return done.stdout

        assert f"{BLOCKS} of {BLOCKS} blocks for 60m" in told("pin", "--tokens", prompt, "--for", "1h")
        (pin,) = json.loads(told("inspect", "pins", "--json"))
        assert str(pin["pin"]) in told("inspect", "pins")
        assert told("unpin", pin["pin"]) == f"ended 1 pin of {BLOCKS} blocks\n"
        again = run("unpin", pin["pin"], "--server", service.address)
        assert (again.returncode, "no such pin" in again.stdout) == (1, True)
        assert f"{BLOCKS} left the host tier" in told("move", "--tokens", prompt, "--wait", "30s")
        assert told("prefetch", "--tokens", prompt, "--wait", "30s").startswith(f"{BLOCKS} of {BLOCKS}")
        assert f"would delete {BLOCKS}" in told("delete", "--tokens", prompt, "--dry-run")
        assert f"deleted {BLOCKS} blocks" in told("delete", "--tokens", prompt, "--yes")
        assert told("quota", "t", "0.25") == "t: 0.25 of each namespace, 1 before\n"
        told("quota", "t", "1")

    def test_a_negative_share_is_refused_as_a_share(self, service: LocalService) -> None:
        done = run("quota", "t", "-1", "--server", service.address)
        assert done.returncode == 2
        assert "SHARE" in done.stderr
        assert "No such option" not in done.stderr

    def test_a_prefix_has_to_be_named(self, service: LocalService) -> None:
        done = run("pin", "--server", service.address)
        assert done.returncode == 2
        assert "--tokens or --hashes" in done.stderr


class TestLists:
    """Hashes have to be those of a path: the tiers keep whole prefixes."""

    @pytest.mark.parametrize("command", ["pin", "prefetch", "move", "delete", "unpin"])
    def test_hashes_that_are_no_path_are_refused(
        self, service: LocalService, shared: tuple[LocalService, Engine], control: Control, command: str
    ) -> None:
        keys = [block.hash for block in control.explain(PREFIX).blocks]
        wrong = {
            "does not continue the hash before it": [
                keys[:2] + keys[3:5],
                keys[:1] + keys[2:3],
                ["ab" * 32, *keys],
            ],
            "does not continue from a beginning": [keys[-1:], keys[3:]],
            "given twice": [keys[:1] * 4],
        }
        for reason, lists in wrong.items():
            for hashes in lists:
                with pytest.raises(RefusedError, match=reason):
                    service.ask(command, hashes=hashes)
        assert control.pins() == []
        assert tiers(control) == ["host"] * BLOCKS
        assert service.ask("integrity") == []
