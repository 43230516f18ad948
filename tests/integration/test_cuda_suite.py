"""The tests in tests/gpu on the stand-in driver, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import cuda_stand_in
from tests.native_build import ROOT
from tests.transfer_help import require_nixl

pytestmark = pytest.mark.slow

SUITE = ROOT / "tests/gpu"
REAL = {
    "test_init_command.py": "it measures",
    "test_paddle_gpu.py": "Paddle for the CPU has no GPU tensors",
    "test_vllm_early_loads.py": "PyTorch for the CPU has no GPU tensors",
    "test_cuda_order.py::test_a_captured_stream_is_refused_with_the_remedy": "the stand-in has no graphs",
    "test_host_memory_gpu.py::test_a_low_limit_on_locked_memory_is_named_with_the_remedy": "it locks no memory",
}
"""Tests that need a real GPU, with the reason."""
SLOW_COPIES = (
    "test_controller_model_gpu.py",
    "test_cuda_loads.py",
    "test_cuda_order.py",
    "test_cuda_submission.py",
)


def modules() -> list[str]:
    return sorted(path.name for path in SUITE.glob("test_*.py") if path.name not in REAL)


@pytest.mark.parametrize(
    ("module", "delays"), [(name, "0 0") for name in modules()] + [(name, "20 300") for name in SLOW_COPIES]
)
def test_the_gpu_suite_passes(cuda_driver: Path, module: str, delays: str) -> None:
    skipped = [option for each in REAL if "::" in each for option in ("--deselect", f"tests/gpu/{each}")]
    arguments = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *skipped, f"tests/gpu/{module}"]
    if "rdma" in module:
        require_nixl()
    done = cuda_stand_in.run(cuda_driver, *arguments, STAND_IN_DELAYS=delays, STAND_IN_GPUS="2")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


def test_the_tests_that_need_a_gpu_exist() -> None:
    for each in REAL:
        name, _, function = each.partition("::")
        assert f"def {function}" in (SUITE / name).read_text()
