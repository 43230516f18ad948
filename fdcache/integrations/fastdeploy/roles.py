"""FastDeploy's scheduler in the roles prefill and decode: its protocol between instances moves fdcache's blocks.

FastDeploy asks decode for room, waits for a messenger of its own to know the blocks, and sends the first token when the
messenger has sent them. Its v1 cache manager has no messenger. Here

- a request that prefill has room for names the addresses of prefill's ranks (``disaggregate_info``);
- the messenger's answers come from the manager, as soon as the first token proves that the blocks are computed;
- decode adds a request to its running ones when its blocks have been fetched, or are known to be computed instead;
- a slot of decode's batch goes to nobody else before the last token of the request that it was taken from has come.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fdcache.integrations.fastdeploy.engine import LinkedManager
from fdcache.integrations.fastdeploy.splitwise import Splitwise


def adapt_roles(scheduler: type, tokens: type, connector: type) -> None:
    """Add hand-overs to FastDeploy's scheduler, token processor and protocol. Without a role nothing changes."""
    for owner, name, adapt in (
        (scheduler, "preallocate_resource_in_p", _with_addresses),
        (scheduler, "add_prefilled_request", _with_fetches),
        (scheduler, "_prepare_preempt_task", _with_stops),
        (scheduler, "preallocate_resource_in_d", _with_free_slots),
        (tokens, "_process_batch_output_use_zmq", _with_late_tokens),
        (tokens, "_recycle_resources", _with_sends),
        (connector, "__init__", _with_answers),
    ):
        setattr(owner, name, adapt(getattr(owner, name)))


def _splitwise(scheduler: Any) -> Splitwise | None:
    manager = scheduler.cache_manager
    return manager.splitwise if isinstance(manager, LinkedManager) else None


def add_arrivals(scheduler: Any) -> None:
    """Add the requests from prefill whose blocks are there to those that decode runs."""
    splitwise = _splitwise(scheduler)
    if splitwise is None:
        return
    with scheduler.lock:  # the scheduler takes blocks under its lock
        ready = splitwise.take_ready()
    for arrival in ready:
        arrival.request.num_computed_tokens = arrival.computed
        type(scheduler).add_prefilled_request.__wrapped__(scheduler, arrival.output)


def _with_addresses(preallocate: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    @functools.wraps(preallocate)
    def preallocate_and_offer(self: Any, request: Any) -> bool:
        done = preallocate(self, request)
        if done and (splitwise := _splitwise(self)) is not None:
            splitwise.offer(request)
        return done

    return preallocate_and_offer


def _with_fetches(add: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @functools.wraps(add)
    def add_when_fetched(self: Any, request_output: Any) -> None:
        splitwise, request = _splitwise(self), self.requests.get(request_output.request_id)
        if splitwise is None or request is None:
            add(self, request_output)
        else:
            splitwise.first_token(request, request_output)

    return add_when_fetched


def _with_stops(prepare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @functools.wraps(prepare)
    def prepare_and_note(self: Any, request: Any) -> Any:
        if (splitwise := _splitwise(self)) is not None and splitwise.sees_tokens:
            splitwise.stopping.add(request.idx)
        return prepare(self, request)

    return prepare_and_note


def _with_free_slots(preallocate: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    @functools.wraps(preallocate)
    def preallocate_free(self: Any, request: Any) -> bool:
        """Refuse, so that prefill asks again, while workers still sample for a request that was preempted."""
        splitwise = _splitwise(self)
        if splitwise is not None and splitwise.stopping and self.running:
            return False
        return preallocate(self, request)

    return preallocate_free


def _with_late_tokens(process: Callable[[Any, list[Any]], Any]) -> Callable[[Any, list[Any]], Any]:
    """Drop the tokens of slots without a request, as FastDeploy does where workers send tokens another way.

    Decode clears the slot of a request that it preempts at once, and a message may have a token for it: without this
    FastDeploy fails on it, and the tokens of every request in the message are lost.
    """

    @functools.wraps(process)
    def process_present(self: Any, receive_datas: list[Any]) -> Any:
        scheduler = self.resource_manager
        if (splitwise := _splitwise(scheduler)) is None:
            return process(self, receive_datas)
        sampling = {
            data.batch_id for data in receive_datas if data.tokens is not None and data.tokens[-1] >= 0
        }
        splitwise.sees_tokens = True
        splitwise.stopping &= sampling
        return process(
            self, [data for data in receive_datas if scheduler.tasks_list[data.batch_id] is not None]
        )

    return process_present


def _with_sends(recycle: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(recycle)
    def send_and_recycle(
        self: Any, task_id: str, index: int, task: Any, result: Any = None, is_prefill: bool = False
    ) -> None:
        splitwise = _splitwise(self.resource_manager) if is_prefill else None
        if splitwise is not None:
            if self.resource_manager.cache_manager.unsound([task_id]):
                _undo(self, task, result)
                return
            splitwise.prefilled(task)
        recycle(self, task_id, index, task, result, is_prefill)

    return send_and_recycle


def _undo(processor: Any, task: Any, result: Any) -> None:
    """Take back a token that was sampled above a failed load: the request is preempted, and computed again."""
    count = len(result.outputs.token_ids)
    del task.output_token_ids[-count:]
    processor.tokens_counter[task.request_id] -= count
    result.outputs.token_ids = []
    result.finished = False


def _with_answers(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def make_with_answers(self: Any, cfg: Any, worker_queue: Any, resource_manager: Any) -> None:
        make(self, cfg, worker_queue, resource_manager)
        splitwise = _splitwise(resource_manager)
        if splitwise is not None:
            worker_queue.put_cache_info = splitwise.take_cache_info
            worker_queue.get_finished_add_cache_task_req = splitwise.take_added
            worker_queue.get_finished_req = splitwise.take_sent

    return make_with_answers
