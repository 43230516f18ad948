"""What is loaded and answered with a model of full and sliding-window layers."""

from __future__ import annotations

import pytest

from tests.vllm import hybrid, test_engine
from tests.vllm.engine import BLOCK_SIZE
from tests.vllm.hybrid import LAYERS, WINDOW
from tests.vllm.observed import Observed

Answers = list[list[int]]
model, computed = hybrid.model, hybrid.computed
test_answers = test_engine.test_answers_are_those_without_a_connector_while_blocks_are_evicted
test_corrupted_records = test_engine.test_a_corrupted_record_is_refused_and_its_tokens_are_computed


def blocks_loaded(engine: Observed) -> list[list[int]]:
    """Return the device blocks of each load from now on, as they are planned."""
    found: list[list[int]] = []
    load = engine.manager.load

    def noting(request: object, ids: object) -> int:
        count = load(request, ids)  # type: ignore[arg-type]
        found.append([each for each in ids.tolist() if each >= 0])  # type: ignore[attr-defined]
        return count

    engine.manager.load = noting  # type: ignore[assignment, method-assign]
    return found


def test_pages_are_the_bytes_of_the_engines_own_tensors(engine: Observed) -> None:
    """The layers of all groups lie over each other."""
    layout = engine.manager.layout
    assert [group.tokens for group in layout.groups] == [0, WINDOW, WINDOW]
    assert (layout.num_layers, len(engine.tensors)) == (2, len(LAYERS))
    assert len({pages.data_ptr() for pages in engine.tensors}) == 2


def test_blocks_outside_of_the_windows_are_not_loaded(
    engine: Observed, prompts: Answers, computed: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    engine.answers(prompts)
    engine.forget_device()
    monkeypatch.setattr(engine.manager, "load", engine.manager.load)
    loads = blocks_loaded(engine)
    assert engine.answers([prompts[longest]]) == [computed[longest]]
    pages = (len(prompts[longest]) - 1) // BLOCK_SIZE
    in_window = pages - (pages * BLOCK_SIZE - WINDOW + 1) // BLOCK_SIZE
    assert [len(each) for each in loads] == [pages + 2 * in_window]
    assert in_window < pages
    engine.assert_nothing_is_held()


@pytest.mark.parametrize("group", [1, 2])
def test_a_block_of_a_window_with_the_bytes_of_another_changes_the_answer(
    engine: Observed, prompts: Answers, computed: Answers, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    """The control: wrong bytes in a loaded block are seen in each group."""
    engine.answers(prompts)
    engine.forget_device()
    poll = engine.worker.poll

    def copying() -> set[str]:
        loads = [load.blocks for load in engine.worker._loads.values()]
        received = poll()
        for blocks in loads if received else ():
            for pages in engine.tensors:
                pages[blocks[-3 + group]] = pages[blocks[0]]
        return received

    monkeypatch.setattr(engine.worker, "poll", copying)
    assert engine.answers(prompts) != computed
    monkeypatch.undo()
    engine.settle()
    assert engine.llm.reset_prefix_cache(reset_connector=True)  # wrong blocks were stored as well
    assert engine.answers(prompts) == computed
