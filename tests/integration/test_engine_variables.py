"""Effect in fdcache of the engine's variables."""

from __future__ import annotations

import json
import logging
import logging.handlers
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fdcache.controller.cache_controller import CacheController as Controller
from fdcache.errors import ConfigurationError
from fdcache.integrations.fastdeploy import CacheController, CacheManager, layout_from_config
from fdcache.integrations.fastdeploy.old_module import OLD_VARIABLES
from fdcache.layout import KVLayout
from fdcache.layout_planes import PlaneKind
from fdcache.manager import CacheManager as Manager
from fdcache.manager import Request
from fdcache.manager.requests import PeerSource
from fdcache.metadata import TransferReport
from fdcache.replay.scheduler import Scheduler
from fdcache.settings import VARIABLES, Settings
from fdcache.transfer.handovers import Handovers, PeerTerms
from fdcache_cli.main import run as run_command
from tests.fastdeploy_help import BLOCK, fd_config, fd_request, make, run, settle
from tests.service_engine import PROMPT, Engine
from tests.service_help import service_process, until

RESERVE = "FD_RESERVE_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL"
DECAY = "FD_RESERVE_DECAY_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL"
MINIMUM = "FD_RESERVE_MIN_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL"

Replay = Callable[..., dict[str, Any]]


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_only(**values: str) -> None:
        for name in OLD_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_only


@pytest.fixture
def replay(
    environ: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Replay:
    def run_once(*options: str, **values: str) -> dict[str, Any]:
        environ(**values)
        command = ["fdcache", "replay", "--requests", "150", "--device-blocks", "120", "--verify", "off"]
        monkeypatch.setattr(sys, "argv", [*command, *options, "--json"])
        with pytest.raises(SystemExit) as ended:
            run_command()
        assert ended.value.code == 0
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert (report["leaked_slots"], report["leaked_pins"], report["integrity_error"]) == (0, 0, None)
        return report

    return run_once


def test_every_variable_with_an_effect_has_a_test() -> None:
    used = {name for name in OLD_VARIABLES if VARIABLES[name].used_in}
    texts = [path.read_text() for path in (Path(__file__), *Path(__file__).parent.glob("test_*service*.py"))]
    assert {name for name in used if not any(name in text for text in texts)} == set()


class TestReplay:
    def test_attention_backend_determines_the_planes(self, replay: Replay) -> None:
        few = ("--requests", "5")
        assert replay(*few)["settings"]["planes"] == 4
        assert replay(*few, FD_ATTENTION_BACKEND="FLASH_ATTN")["settings"]["planes"] == 4
        assert replay(*few, FD_ATTENTION_BACKEND="MLA_ATTN")["settings"]["planes"] == 2
        shown = replay("--layout", "uniform", *few, FD_ATTENTION_BACKEND="MLA_ATTN")
        assert shown["settings"]["planes"] == 4

    def test_decode_reserve_prevents_most_preemptions(self, replay: Replay) -> None:
        few = ("--requests", "80")
        plain = replay(*few)["preemptions"]
        reserved = replay(*few, **{RESERVE: "1000", DECAY: "0"})["preemptions"]
        assert 0 < reserved < plain / 3
        assert replay(*few, **{RESERVE: "1000", DECAY: "1000"})["preemptions"] > 2 * reserved
        assert replay(*few, **{MINIMUM: "1000"})["preemptions"] < plain / 3

    def test_decodes_allocate_several_blocks_at_a_time(
        self, replay: Replay, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        allocate = Manager.allocate_device_blocks
        grown: list[int] = []

        def watch(manager: Manager, demands: Iterable[Any]) -> Any:
            demands = list(demands)
            before = [
                len(request.block_table) if request.block_table is not None else 0 for request, _ in demands
            ]
            done = allocate(manager, demands)
            after = [len(request.block_table) for request, _ in demands]
            grown.extend(b - a for a, b in zip(before, after, strict=True) if a)
            return done

        monkeypatch.setattr(Manager, "allocate_device_blocks", watch)
        options = (
            "--requests",
            "8",
            "--concurrency",
            "1",
            "--device-blocks",
            "1000",
            "--chunk-tokens",
            "100000",
        )
        replay(*options)
        singly = grown.count(1)
        assert singly > 10
        assert 3 not in grown
        grown.clear()
        replay(*options, FD_ENC_DEC_BLOCK_NUM="3")
        assert grown.count(3) > 1
        assert grown.count(1) < singly / 2  # the last of a request's blocks

    def test_outputs_of_preempted_requests_are_not_committed(
        self, replay: Replay, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        preempt, commit = Scheduler.preempt, Manager.commit
        left: list[bool] = []
        committed: dict[Any, int] = {}

        def watch(scheduler: Scheduler, job: Any, *rest: Any) -> None:
            full_blocks = committed.pop(job.request, 0) // job.block_size
            left.append(full_blocks * job.block_size > job.prompt_length)
            preempt(scheduler, job, *rest)

        def note(manager: Manager, progress: Any) -> None:
            progress = list(progress)
            committed.update(progress)
            commit(manager, progress)

        monkeypatch.setattr(Scheduler, "preempt", watch)
        monkeypatch.setattr(Manager, "commit", note)
        replay()
        assert any(left)
        left.clear()
        replay(FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST="0")
        assert left
        assert not any(left)


class TestService:
    def test_storage_folder_and_drain_timeout_follow_the_engine(self, tmp_path: Path) -> None:
        (tmp_path / "s").mkdir(mode=0o700)
        theirs = {"FILE_BACKEND_STORAGE_DIR": str(tmp_path / "files"), "FD_CACHE_PROC_EXIT_TIMEOUT": "300ms"}
        settings = {
            "FDCACHE_STORAGE": "local",
            "FDCACHE_STORAGE_SIZE": "4MiB",
            "FDCACHE_STORAGE_FSYNC": "never",
        }
        with service_process(
            tmp_path / "s",
            **settings,
            FILE_BACKEND_STORAGE_DIR=theirs["FILE_BACKEND_STORAGE_DIR"],
            FD_CACHE_PROC_EXIT_TIMEOUT="1",
        ) as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            until(lambda: list((tmp_path / "files").glob("fdcache-*")), "the files exist")
            shown = {name: each["text"] for name, each in service.ask("config")["settings"].items()}
            assert shown["FDCACHE_STORAGE_DIR"] == str(tmp_path / "files")
            assert shown["FDCACHE_DRAIN_TIMEOUT"] == "1"
            assert (
                service.terminate() == 0
            )  # the engine is still connected, and the drain ends after a second
            engine.close()

    def test_own_variables_override_the_engines(self) -> None:
        settings = Settings.load(
            environ={
                "FILE_BACKEND_STORAGE_DIR": "/theirs",
                "FDCACHE_STORAGE_DIR": "/ours",
                "FD_CACHE_PROC_EXIT_TIMEOUT": "7",
                "FDCACHE_DRAIN_TIMEOUT": "3",
            }
        )
        assert settings.storage_tier.directory == Path("/ours")
        assert (settings.server.drain_timeout, settings.transfer.drain_timeout) == (3, 7)
        assert Settings.load(environ={}).storage_tier.directory == Path("/var/lib/fdcache")

    @pytest.mark.parametrize(
        ("values", "level"), [({"FD_DEBUG": "1"}, "DEBUG"), ({"FD_LOG_LEVEL": "INFO"}, "INFO")]
    )
    def test_log_level_folder_and_number_of_files(
        self, values: dict[str, str], level: str, tmp_path: Path
    ) -> None:
        from fdcache.service.server import process

        logger = logging.getLogger("fdcache")
        former = (logger.handlers[:], logger.level, logger.propagate)
        try:
            given = {"FD_LOG_DIR": str(tmp_path / "logs"), "FD_LOG_BACKUP_COUNT": "3", **values}
            process.configure(Settings.load(environ=given))
            (file,) = [
                each
                for each in logger.handlers
                if isinstance(each, logging.handlers.TimedRotatingFileHandler)
            ]
            assert (file.backupCount, logging.getLevelName(logger.level)) == (3, level)
            assert Path(file.baseFilename).parent == tmp_path / "logs"
            file.close()
        finally:
            logger.handlers[:], logger.propagate = former[0], former[2]
            logger.setLevel(former[1])


LAYOUT = KVLayout.uniform(
    model="m", revision="1", block_size=64, num_layers=1, kv_heads=1, head_dim=8, dtype="float16"
)


class TestHandOver:
    def load(self, tmp_path: Path, **values: str) -> Settings:
        given = {
            "FDCACHE_TRANSFER": "ipc",
            "FDCACHE_DEVICE_BLOCKS": "8",
            "FDCACHE_TRANSFER_DIR": str(tmp_path),
        }
        return Settings.load(environ={**given, **values})

    @pytest.mark.parametrize(
        ("flag", "declined"), [({}, 0), ({"PREFILL_CONTINUOUS_REQUEST_DECODE_RESOURCES": "0"}, 1)]
    )
    def test_prefill_is_told_of_a_lack_of_room_unless_decode_tries_again(
        self, tmp_path: Path, flag: dict[str, str], declined: int
    ) -> None:
        settings = self.load(tmp_path, **flag)
        with closing(Manager.from_settings(LAYOUT, settings)) as manager:
            handovers = Handovers(manager, PeerTerms.of(settings))
            request = Request("a", list(range(100)))
            manager.match_prefix([request])
            assert handovers.fetch([(request, PeerSource("a", ("ipc:///none",)))]) == [1]
            assert not manager.allocate_device_blocks([(request, 9 * 64)])[0].ok
            manager.unmatch([request])
            told = [task for plan in manager.take_plans() for task in plan.peers]
            assert [task.wanted for task in told] == [False] * declined

    @pytest.mark.parametrize(("most", "room"), [("2", [2, 1, 0]), ("0", [1, 0, 0])])
    def test_as_many_requests_wait_for_peers_as_are_to_be_prefetched(
        self, tmp_path: Path, most: str, room: list[int]
    ) -> None:
        settings = self.load(tmp_path, FD_EP_MAX_PREFETCH_TASK_NUM=most)
        with closing(Manager.from_settings(LAYOUT, settings)) as manager:
            handovers = Handovers(manager, PeerTerms.of(settings))
            found = [handovers.fetch_room]
            for name in range(2):
                request = Request(f"{name}", [name] * 100)
                manager.match_prefix([request])
                handovers.fetch([(request, PeerSource(f"{name}", ("ipc:///none",)))])
                assert manager.allocate_device_blocks([(request, 100)])[0].ok
                manager.take_plans()
                found.append(handovers.fetch_room)
            assert found == room

    @pytest.mark.parametrize("changeable", [False, True])
    @pytest.mark.parametrize("role", ["prefill", "decode"])
    def test_a_deployment_that_may_change_does_both_parts(
        self, tmp_path: Path, role: str, changeable: bool
    ) -> None:
        settings = self.load(tmp_path, FDCACHE_TRANSFER_ROLE=role, FD_PD_CHANGEABLE=str(int(changeable)))
        controller = Controller.from_settings(LAYOUT, settings)
        with closing(Manager.from_settings(LAYOUT, settings)) as manager:
            handovers = Handovers(manager, PeerTerms.of(settings))
            controller.initialize_kv_cache(8)
            address = controller.open_transfer()
            request = Request("a", list(range(100)))
            manager.match_prefix([request])
            if role == "prefill":
                handovers.fetch([(request, PeerSource("a", (str(address),)))])
            assert manager.allocate_device_blocks([(request, 100)])[0].ok
            if role == "decode":
                handovers.send([(request, "a")])
            (plan,) = manager.take_plans()
            controller.submit_swap_tasks(plan)
            if changeable:
                assert controller.transfer_stats().role == "mixed"  # type: ignore[union-attr]
                assert not [each for each in controller.poll() if each.handover]
            else:
                reports: list[TransferReport] = []

                def have_ended() -> bool:
                    reports.extend(controller.poll())
                    return len(reports) == 2

                until(have_ended, "both have ended")
                (ended,) = [each for each in reports if each.handover]
                assert f"FDCACHE_TRANSFER_ROLE={role}" in (ended.results[0].error_message or "")
            controller.shutdown()

    @pytest.mark.parametrize("eager", [False, True])
    def test_peers_that_are_named_are_connected_early(self, tmp_path: Path, eager: bool) -> None:
        settings = self.load(tmp_path, FD_ENABLE_PD_RDMA_EAGER_CONNECT=str(int(eager)))
        controllers = [Controller.from_settings(LAYOUT, settings) for _ in range(2)]
        try:
            addresses = []
            for each in controllers:
                each.initialize_kv_cache(8)
                addresses.append(str(each.open_transfer()))
            controllers[0].connect_peers(addresses[1:])

            def states() -> list[str]:
                stats = controllers[0].transfer_stats()
                return [peer.state for peer in stats.peers] if stats else []

            if eager:
                until(lambda: states() == ["accepted"], "it is connected")
            assert len(states()) == eager
        finally:
            for each in controllers:
                each.shutdown()

    @pytest.mark.parametrize(
        ("values", "seconds"), [({}, 30), ({"FD_PREFILL_WAIT_DECODE_RESOURCE_SECONDS": "7"}, 7)]
    )
    def test_prefill_waits_for_decode_as_configured(self, values: dict[str, str], seconds: float) -> None:
        settings = Settings.load(environ={"FDCACHE_TRANSFER": "ipc", "FDCACHE_DEVICE_BLOCKS": "8", **values})
        with closing(Manager.from_settings(LAYOUT, settings)) as manager:
            handovers = Handovers(manager, PeerTerms.of(settings))
            request = Request("a", list(range(100)))
            manager.match_prefix([request])
            assert manager.allocate_device_blocks([(request, 100)])[0].ok
            handovers.send([(request, "transfer")])
            (plan,) = manager.take_plans()
            (task,) = plan.peers
            assert task.timeout == seconds


class TestDeterministicMode:
    def test_reuse_grid_is_the_split_size(self, replay: Replay) -> None:
        few = ("--requests", "5")
        assert replay(*few)["settings"]["reuse_grid"] == 0
        shown = replay(*few, FD_DETERMINISTIC_MODE="1", FD_DETERMINISTIC_SPLIT_KV_SIZE="128")
        assert shown["settings"]["reuse_grid"] == 128


class TestFastDeploy:
    def test_attention_backend_determines_the_planes(self, environ: Callable[..., None]) -> None:
        def kinds() -> list[PlaneKind]:
            return [plane.kind for plane in layout_from_config(fd_config(latent=16)).layer_planes(0)]

        environ()
        assert kinds() == [PlaneKind.KEY]
        environ(FD_ATTENTION_BACKEND="MLA_ATTN")
        assert kinds() == [PlaneKind.KEY]
        environ(FD_ATTENTION_BACKEND="FLASH_ATTN")
        assert kinds() == [PlaneKind.KEY, PlaneKind.VALUE]

        environ(FD_ATTENTION_BACKEND="DSA_ATTN")
        with pytest.raises(ConfigurationError, match="index_head_dim"):
            layout_from_config(fd_config(latent=16))
        config = fd_config(latent=512)
        config.model_config.index_head_dim = 128
        key, index = layout_from_config(config).layer_planes(0)
        assert (key.kind, key.dtype, key.shape) == (PlaneKind.KEY, "uint8", (1, BLOCK, 512 + 16 + 16))
        assert (index.kind, index.dtype, index.shape) == (PlaneKind.INDEXER, "uint8", (BLOCK, 132))

    @pytest.mark.parametrize("backend", ["MLA_ATTN", "DSA_ATTN"])
    def test_a_backend_for_latents_is_refused_without_them(
        self, backend: str, environ: Callable[..., None]
    ) -> None:
        environ(FD_ATTENTION_BACKEND=backend)
        with pytest.raises(ConfigurationError, match=rf"{backend} \(environment\).*no kv_lora_rank"):
            layout_from_config(fd_config())

    @pytest.mark.parametrize("keeps", ["0", "1"])
    def test_preempted_request_leaves_its_outputs_if_configured(
        self, keeps: str, environ: Callable[..., None]
    ) -> None:
        environ(FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST=keeps)

        def found(status: str) -> int:
            manager = make()
            request = fd_request("a", 2 * BLOCK)
            run(manager, request, outputs=2 * BLOCK + 1)
            request.status = SimpleNamespace(name=status)
            manager.request_finish(request)
            settle(manager)
            again = fd_request("b", prompt=[*request.prompt_token_ids, *request.output_token_ids])
            manager.match_prefix(again)
            manager.core.check_integrity()
            blocks: int = again._match_result.matched_device_nums
            return blocks

        assert found("PREEMPTED") == (4 if keeps == "1" else 2)
        assert found("FINISHED") == 4

    @pytest.mark.parametrize("clears", ["0", "1"])
    def test_sleep_frees_the_host_cache_if_configured(
        self, clears: str, environ: Callable[..., None]
    ) -> None:
        pytest.importorskip("paddle")
        environ(FD_ENABLE_SWAP_SPACE_CLEARING=clears)
        backend = SimpleNamespace()
        controller = CacheController(fd_config(), 0, 0)
        controller.initialize_kv_cache(backend, 8)
        controller.free_gpu_cache()
        assert (controller.core.host_arena is None) is (clears == "1")
        controller.initialize_kv_cache(backend, 8)
        assert controller.core.host_arena is not None
        controller.shutdown()

    def test_old_manager_beside_the_adapter_is_a_warning(
        self, environ: Callable[..., None], caplog: pytest.LogCaptureFixture
    ) -> None:
        for values, times in (
            ({"ENABLE_V1_KVCACHE_MANAGER": "0"}, 1),
            ({"ENABLE_V1_KVCACHE_MANAGER": "1"}, 0),
        ):
            environ(**values)
            caplog.clear()
            with caplog.at_level(logging.WARNING, "fdcache"):
                CacheManager(fd_config())
            shown = [each for each in caplog.messages if "set ENABLE_V1_KVCACHE_MANAGER=1" in each]
            assert len(shown) == times


class TestPaddleEngine:
    SMALL = (
        "--layers 1 --hidden 32 --heads 2 --kv-heads 1 --head-dim 16 --ffn 32 --vocab 64 --requests 8 --users 8 "
        "--scale 16 --answer-scale 2 --device-blocks 24 --ordinary"
    )

    @pytest.fixture
    def preemptions(self, environ: Callable[..., None]) -> Iterator[Callable[..., int]]:
        pytest.importorskip("paddle")
        from examples.paddle_engine.__main__ import parse
        from examples.paddle_engine.kv_cache import FreshBlocks

        def run_once(**values: str) -> int:
            environ(**values)
            demo, _ = parse(self.SMALL.split())
            return sum(task.preemptions for task in demo.run(FreshBlocks(demo.engine)).tasks)

        yield run_once

    def test_admission_follows_the_engine(self, preemptions: Callable[..., int]) -> None:
        plain = preemptions()
        reserved = preemptions(**{RESERVE: "1000", DECAY: "0"})
        assert 0 < reserved < plain
        assert preemptions(**{RESERVE: "1000", DECAY: "1000"}) > reserved
        assert preemptions(**{MINIMUM: "1000"}) == reserved
        assert preemptions(FD_ENC_DEC_BLOCK_NUM="8") != plain

    def test_digests_of_logits_are_equal_with_and_without_the_cache(
        self, environ: Callable[..., None], capfd: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("paddle")
        from examples.paddle_engine.__main__ import main

        def digests(**values: str) -> list[str]:
            environ(**values)
            few = self.SMALL.replace("--requests 8", "--requests 3").replace(" --ordinary", "")
            assert main(few.split()) == 0
            return [line for line in capfd.readouterr().err.splitlines() if line.startswith("digest ")]

        assert digests() == []
        found = digests(FD_DETERMINISTIC_LOG_MODE="1")
        assert found
        assert all(found.count(line) == 2 for line in found)
