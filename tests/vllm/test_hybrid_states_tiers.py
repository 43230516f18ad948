"""What outlives an engine, with a model that keeps states."""

from __future__ import annotations

from tests.vllm import hybrid_states
from tests.vllm.test_tiers import (  # noqa: F401 - with this model
    test_a_restarted_engine_finds_its_blocks_in_storage,
    test_engines_share_a_service_and_outlive_it,
)

model, computed = hybrid_states.model, hybrid_states.computed
