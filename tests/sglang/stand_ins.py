"""Stand-ins for what SGLang has for GPUs alone, so that its engine runs on a CPU: installed in every process of it.

torchvision and ``sgl_kernel`` have no build for the torch of the environment. A text model with ``torch_native``
attention imports them and calls nothing: a call of a kernel raises. Host pools copy with ``tests.sglang.copies``, and
their memory is not registered with a driver. They leave no 10 GiB
of the machine's memory unused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

_VERSIONS = {"torchvision": "0.28.0", "sgl_kernel": "0.4.10"}
_POOLS = "sglang.srt.mem_cache.pool_host"


class _EmptyPackages(MetaPathFinder, Loader):
    """Finds the packages and every module in them."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in _VERSIONS:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        package = spec.name.partition(".")[0]
        module.__dict__.update(__version__=_VERSIONS[package], __getattr__=_names_of(package))
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _names_of(package: str) -> Callable[[str], Any]:
    def named(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        missing = NotImplementedError(f"{package}.{name} runs on GPUs alone")
        return MagicMock(name=name, side_effect=missing if package == "sgl_kernel" else None)

    return named


class _Completed(MetaPathFinder):
    """Finds modules of SGLang that lack something on a CPU, and completes them after their import."""

    def __init__(self, missing: dict[str, Callable[[ModuleType], None]]) -> None:
        self._missing = missing

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in self._missing:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            setattr(spec.loader, "exec_module", self._executed(fullname, spec.loader.exec_module))  # noqa: B010
        return spec

    def _executed(self, name: str, execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def run(module: ModuleType) -> None:
            execute(module)
            self._missing[name](module)

        return run


def _with_copies(module: ModuleType) -> None:
    from tests.sglang import copies

    for name, function in vars(copies).items():
        if name.startswith("transfer_kv"):
            setattr(module, name, function)


def _without_driver(module: ModuleType) -> None:
    for name in ("_cuda_host_register", "_cuda_host_unregister"):
        setattr(module, name, lambda *arguments, **options: None)


def _without_reserve(module: ModuleType) -> None:
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # type: ignore[attr-defined]


def _with_latents(module: ModuleType) -> None:
    """``torch_native`` reads keys and values out of the pool, which are latents: they have to be absorbed always."""
    absorbed = module.AttnForwardMethod.MLA
    module.AttentionBackendRegistry.register("torch_native", lambda attention, batch: absorbed)


def _with_windows(module: ModuleType) -> None:
    """``torch_native`` writes keys and values of windows where their pool has them, and reads them elsewhere."""
    backend = module.TorchNativeAttnBackend
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(backend, name, _reading_windows(getattr(backend, name)))


def _reading_windows(run: Callable[..., Any]) -> Callable[..., Any]:
    def translated(
        self: Any, query: Any, output: Any, keys: Any, values: Any, places: Any, *more: Any, **options: Any
    ) -> Any:
        if self.use_sliding_window_kv_pool:
            pool = self.token_to_kv_pool
            if keys.data_ptr() in {buffer.data_ptr() for buffer in pool.swa_kv_pool.k_buffer}:
                places = pool.translate_loc_from_full_to_swa(places.long())
        return run(self, query, output, keys, values, places, *more, **options)

    return translated


def _with_convolutions(module: ModuleType) -> None:
    from tests.sglang import convolutions

    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        setattr(module, name, getattr(convolutions, name))


def _with_operators(module: ModuleType) -> None:
    """Linear attention names operators of the kernels when it is imported, also for models without it."""
    import torch

    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name in ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu"):
        library.define(f"{name}(Tensor x) -> Tensor")
    setattr(module, "_operators_of_tests", library)  # noqa: B010


def install() -> None:
    """Let imports find the stand-ins."""
    if any(isinstance(finder, _EmptyPackages) for finder in sys.meta_path):
        return
    sys.meta_path[:0] = [
        _EmptyPackages(),
        _Completed(
            {
                f"{_POOLS}.base": _without_reserve,
                f"{_POOLS}.common": _without_driver,
                f"{_POOLS}.mha": _with_copies,
                f"{_POOLS}.mla": _with_copies,
                "sglang.srt.layers.attention.attention_registry": _with_operators,
                "sglang.srt.layers.attention.torch_native_backend": _with_windows,
                "sglang.srt.layers.attention.mamba.causal_conv1d": _with_convolutions,
                "sglang.srt.models.deepseek_common.attention_backend_handler": _with_latents,
            }
        ),
    ]
