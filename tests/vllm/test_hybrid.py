"""The tests of ``test_engine`` with a model of full and sliding-window layers."""

from __future__ import annotations

from tests.vllm import hybrid
from tests.vllm.test_engine import *  # noqa: F403

model, computed = hybrid.model, hybrid.computed
del test_pages_are_the_bytes_of_the_engines_own_tensors  # noqa: F821 - it expects the planes of one group
