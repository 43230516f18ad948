"""The tests of ``test_engine`` with a model that keeps states."""

from __future__ import annotations

from tests.vllm import hybrid_states
from tests.vllm.test_engine import *  # noqa: F403

model, computed, engine = hybrid_states.model, hybrid_states.computed, hybrid_states.engine
del test_pages_are_the_bytes_of_the_engines_own_tensors  # noqa: F821 - it expects the planes of one group
