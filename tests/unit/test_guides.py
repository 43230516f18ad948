"""The guides show the code that is there."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

import fdcache
from fdcache import CacheController, CacheManager
from fdcache.devices.cuda import CudaDevice
from fdcache.integrations import fastdeploy
from fdcache.layout import KVLayout, LayoutOptions
from fdcache.settings import VARIABLES
from release.site import render_reference

ROOT = Path(__file__).parent.parent.parent
GUIDES = [
    "docs/embedding.md",
    "docs/gpu.md",
    "docs/fastdeploy.md",
    "docs/architecture.md",
    "docs/migration.md",
]
SOURCES = {
    path.name: [line.strip() for line in path.read_text().splitlines()]
    for path in [
        ROOT / "examples/embedding.py",
        ROOT / "examples/offloading.py",
        *sorted((ROOT / "examples/paddle_engine").glob("*.py")),
    ]
}


NAMED_IN_TABLE: dict[str, Any] = {
    each.__name__: each for each in (CacheController, CacheManager, CudaDevice, KVLayout)
}


def blocks(page: str) -> list[list[str]]:
    text = (ROOT / page).read_text()
    return [
        [line.strip() for line in block.splitlines() if line.strip()]
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    ]


def stands_in(lines: list[str], source: list[str]) -> bool:
    return any(source[i : i + len(lines)] == lines for i in range(len(source)))


@pytest.mark.parametrize("lines", blocks("docs/embedding.md"), ids=lambda lines: lines[0][:40])
def test_every_snippet_of_the_embedding_guide_stands_in_the_example(lines: list[str]) -> None:
    assert any(stands_in(lines, source) for source in SOURCES.values())


@pytest.mark.parametrize("module", ["kv_cache.py", "worker.py"])
def test_the_embedding_guide_shows_every_call_into_fdcache(module: str) -> None:
    shown = {line for lines in blocks("docs/embedding.md") for line in lines}
    pattern = (
        r"self\.(manager|controller)\.\w+\(|= (CacheManager|CacheController|Request)(\.from_settings)?\("
    )
    calls = [line for line in SOURCES[module] if re.search(pattern, line)]
    assert len(calls) >= 6
    assert not [line for line in calls if line not in shown]


def test_the_site_has_every_page() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = re.findall(r"[\w/-]+\.md", str(nav))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(pages | {"reference/python.md"})


def test_the_reference_of_the_site_has_every_public_name() -> None:
    text = render_reference()
    missing = [name for name in fdcache.__all__ if name != "__version__" and f"## {name}\n" not in text]
    assert not missing
    assert "### CacheManager.match_prefix" in text and "::\n" not in text


@pytest.mark.parametrize("picture", sorted((ROOT / "docs/images").glob("*.svg")), ids=lambda path: path.name)
def test_pictures_are_well_formed(picture: Path) -> None:
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("section", "owner"), [("CacheManager", "CacheManager"), ("CacheController", "CacheController")]
)
def test_members_that_the_migration_table_keeps_exist(section: str, owner: str) -> None:
    text = (ROOT / "docs/migration.md").read_text()
    table = re.search(rf"## {section}, (.*?)\n## ", text, re.DOTALL)
    assert table is not None
    rows = [line.split("|")[1:4] for line in table[1].splitlines() if line.startswith("| `")]
    known = getattr(fastdeploy, owner)
    kept = [
        name
        for old, now, _ in rows
        if not now.strip().startswith(("gone", "not used"))
        for name in names(old)
    ]
    assert len(kept) > 10
    instance_only = {"swap_layer_done_counter", "cache_config"}
    matched = {"device_nodes", "device_block_ids"}
    for name in kept:
        found = hasattr(known, name) or name in instance_only
        assert found or (name in matched and hasattr(fastdeploy.MatchedPrefix, name)), name


OLD_MEMBERS = {
    "CacheManager": """is_initialized device_pool host_pool radix_tree storage_scheduler num_free_device_blocks
        num_free_host_blocks gpu_free_block_list available_gpu_resource can_allocate_device_blocks
        can_allocate_host_blocks can_allocate_gpu_blocks match_prefix allocate_device_blocks allocate_gpu_blocks
        allocate_host_blocks free_device_blocks free_host_blocks free_all_device_blocks free_all_host_blocks
        resize_device_pool update_cache_config request_finish get_pending_backup_count check_and_add_pending_backup
        issue_pending_backup_to_batch_request offload_to_host load_from_host prepare_prefetch_metadata prefetch_storage
        drain_pending_prefetches update_storage_blocks_to_host abort_prefetch_blocks write_cache_to_storage reset_cache
        get_stats get_memory_usage recycle_gpu_blocks update_cache_blocks write_cache_to_storage_decode""",
    "CacheController": """is_initialized initialize_kv_cache initialize_mtp_kv_cache initialize_host_cache
        submit_swap_tasks
        load_host_to_device evict_device_to_host prefetch_from_storage backup_device_to_storage
        backup_host_to_storage send_to_node wait_for_transfer_from_node reset_cache free_cache free_gpu_cache start
        stop get_stats""",
    "LayerDoneCounter and CacheTransferManager": """set_layer_event mark_layer_done mark_all_done is_layer_done
        is_all_done wait_for_layer wait_all register_callback cleanup get_pending_layers evict_to_host_async
        load_layers_to_device_async set_cache_kvs_map set_host_cache_kvs_map sync_input_stream sync_output_stream
        record_input_stream_event prefetch_from_storage backup_to_storage""",
}


@pytest.mark.parametrize("section", OLD_MEMBERS)
def test_the_migration_table_has_every_old_member(section: str) -> None:
    text = (ROOT / "docs/migration.md").read_text()
    table = re.search(rf"\n## {section}[^\n]*\n(.*?)\n## ", text, re.DOTALL)
    assert table is not None
    cells = [line.split("|")[1] for line in table[1].splitlines() if line.startswith("| ")]
    told = set(re.findall(r"\w+", " ".join(cells)))
    assert sorted(set(OLD_MEMBERS[section].split()) - told) == []


TRANSFER_PROCESS = {
    "arguments": """splitwise_role rank device_id num_layers head_dim kv_num_head rdma_port mp_num protocol
        enable_splitwise cache_queue_port engine_worker_queue_port pod_ip engine_pid num_gpu_blocks num_cpu_blocks
        block_size bytes_per_layer_per_block cache_dtype speculative_config local_data_parallel_id
        create_cache_tensor""",
    "signals": """cache_ready_signal swap_space_ready_signal cache_task_broadcast_signal kv_cache_status
        prefix_tree_status worker_healthy_live_signal""",
    "variables": "FD_ENABLE_SWAP_SPACE_CLEARING FD_CACHE_PROC_ERROR_COUNT FD_CACHE_PROC_EXIT_TIMEOUT",
    "operators": "swap_cache_all_layers cuda_host_alloc cuda_host_free EngineCacheQueue",
}


def transfer_process() -> list[tuple[str, str]]:
    """Return the arguments of the old transfer process, row by row, with the page's words on each."""
    text = (ROOT / "docs/migration.md").read_text()
    table = text.split("\n## From the per-rank transfer process\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")][1:]
    return [(old.strip(), now.strip()) for old, now in rows]


@pytest.mark.parametrize("kind", TRANSFER_PROCESS)
def test_what_the_transfer_process_took_is_mapped_once(kind: str) -> None:
    told = [name for old, _ in transfer_process() for name in re.findall(r"`(\w+)(?:\(\.\.\.\))?`", old)]
    assert {name: told.count(name) for name in TRANSFER_PROCESS[kind].split()} == dict.fromkeys(
        TRANSFER_PROCESS[kind].split(), 1
    )


@pytest.mark.parametrize(("old", "now"), transfer_process(), ids=lambda text: text[:40])
def test_what_is_named_in_its_place_is_there_or_the_reason_is(old: str, now: str) -> None:
    if now.startswith("gone"):
        assert re.match(r"gone: .{20}", now), "it says why"
        return
    new = re.findall(r"`([^`]+)`", now)
    assert new
    for each in new:
        if each.startswith("FDCACHE_"):
            assert each in VARIABLES
        elif not each.startswith("fdcache ") and f"`{each}`" not in old:
            takes(each)


def takes(call: str) -> None:
    """``Owner.member(argument=...)`` exists and takes these arguments."""
    path, _, arguments = call.rstrip(")").partition("(")
    owner, *members = path.split(".")
    target = NAMED_IN_TABLE[owner]
    for member in members:
        assert member in dir(target) or member in target.__dataclass_fields__, call
        target = getattr(target, member, None)
    known: set[str] = set()
    if arguments:
        known = set(signature(target).parameters)
    if "options" in known:
        known |= set(LayoutOptions.__annotations__)
    assert set(re.findall(r"(\w+)=", arguments)) <= known, call


def names(cell: str) -> list[str]:
    """Members named in a cell of the table."""
    quoted = re.findall(r"`(?:MatchResult\.)?([a-z_]+)(?:\([^`]*\))?`", cell)
    return [name for name in quoted if not name.startswith(("write_through", "write_back"))]


def test_the_files_that_the_architecture_names_are_there() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    named = re.findall(r"`([a-z_/]+\.(?:py|cpp)|csrc/[a-z]+/)`", text)
    assert len(named) > 40
    assert [
        each for each in named if not ((ROOT / "fdcache" / each).exists() or (ROOT / each).exists())
    ] == []


def named_tests() -> list[tuple[str, str]]:
    """The file and the function or class that each row of docs/faults.md ends with."""
    text = (ROOT / "docs/faults.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "| test |" not in line]
    found = re.findall(r"\| `(\w+/\w+\.py)(?:::(\w+))?` \|$", text, re.MULTILINE)
    assert len(found) == len(rows) > 40
    return sorted(set(found))


@pytest.mark.parametrize(("file", "name"), named_tests())
def test_each_fault_names_a_test_that_is_there(file: str, name: str) -> None:
    text = (ROOT / "tests" / file).read_text()
    assert re.search(rf"^ *(def|class) {name or 'test_'}", text, re.MULTILINE)
