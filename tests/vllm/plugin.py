"""A platform for vLLM's published wheel on a machine without a GPU.

vLLM loads ``register`` through the entry point that ``tests.vllm.engine.install_plugin`` writes. The wheel has no
kernels for CPUs: attention and three operators are plain torch here.
"""

from __future__ import annotations


def register() -> str:
    """Return the name of the platform's class."""
    return "tests.vllm.platform.TestPlatform"
