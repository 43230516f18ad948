"""Generated workloads: determinism, order and shape."""

from collections import Counter

import pytest

from fdcache.replay.workloads import WorkItem, WorkloadName, generate

ALL = list(WorkloadName)


def items_of(name: WorkloadName, requests: int = 200, seed: int = 3) -> list[WorkItem]:
    return list(generate(name, requests, seed))


@pytest.mark.parametrize("name", ALL)
def test_equal_seeds_give_equal_requests(name: WorkloadName) -> None:
    for first, second in zip(items_of(name), items_of(name), strict=True):
        assert first.timestamp_ms == second.timestamp_ms
        assert (first.tokens(3) == second.tokens(3)).all()
    assert [i.prompt_length for i in items_of(name)] != [i.prompt_length for i in items_of(name, seed=4)]


@pytest.mark.parametrize("name", ALL)
def test_requests_are_numbered_in_order_of_arrival(name: WorkloadName) -> None:
    items = items_of(name)
    assert [item.index for item in items] == list(range(200))
    times = [item.timestamp_ms for item in items]
    assert times == sorted(times)
    assert all(item.output_length >= 1 for item in items)


@pytest.mark.parametrize("name", [WorkloadName.CHAT, WorkloadName.AGENT])
def test_a_turn_starts_with_the_previous_prompt_and_its_output(name: WorkloadName) -> None:
    items = items_of(name)
    later = [item for item in items if item.after is not None]
    assert len(later) > len(items) / 3
    for item in later:
        assert item.after is not None
        former = items[item.after]
        history = former.tokens(0)
        assert (item.tokens(0)[: len(history)] == history).all()
        assert item.prompt_length > len(history)
        assert item.timestamp_ms > former.timestamp_ms


@pytest.mark.parametrize("name", [WorkloadName.CHAT, WorkloadName.AGENT])
def test_conversations_share_a_few_system_prompts(name: WorkloadName) -> None:
    opening = [item for item in items_of(name) if item.after is None]
    systems = Counter(int(item.streams[0]) for item in opening)
    assert len(systems) <= 4 < len(opening)


def test_agents_pause_less_and_have_longer_prompts_than_chats() -> None:
    chat, agent = items_of(WorkloadName.CHAT), items_of(WorkloadName.AGENT)
    assert sum(i.think_ms for i in agent) < sum(i.think_ms for i in chat) / 4
    assert sum(i.prompt_length for i in agent) > 2 * sum(i.prompt_length for i in chat)


def test_rag_reads_a_few_documents_often_and_many_once() -> None:
    documents = Counter(int(item.streams[1]) for item in items_of(WorkloadName.RAG, requests=500))
    counts = sorted(documents.values(), reverse=True)
    assert counts[0] > 10 * counts[len(counts) // 2]
    assert counts[-1] == 1


def test_unique_shares_no_first_block() -> None:
    starts = {item.tokens(0)[:16].tobytes() for item in items_of(WorkloadName.UNIQUE)}
    assert len(starts) == 200
