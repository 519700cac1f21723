"""The head's gradient in a pipeline: a queue that torch's zero-bubble schedules drain, on two ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")
schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="this torch has no pipelines")

from ranks import Failed, Ranks, group_of  # noqa: E402

from logitless.tolerances import TINY, error  # noqa: E402
from logitless.torch_impl import WeightGradQueue, linear_cross_entropy  # noqa: E402

SIZE, VOCAB, STAGES, MICROBATCHES, TOKENS = 8, 50, 4, 8, 32
# name → whether rank 0 holds the last stage beside the first.
SCHEDULES = {"ScheduleInterleavedZeroBubble": False, "ScheduleZBVZeroBubble": True, "ScheduleDualPipeV": True}


class Logged(WeightGradQueue):
    """Writes down every B and W, what waits after it, and whether the head has a gradient."""

    def __init__(self, limit: int, head: Any, fails_at: int | None) -> None:
        super().__init__(limit)
        self.head, self.fails_at = head, fails_at
        self.events: list[tuple[str, int, int, bool]] = []
        self.microbatches = 0

    def dw_builder(self) -> Callable[[], Callable[[], None]]:
        build = super().dw_builder()

        def logged() -> Callable[[], None]:
            run, number = build(), self.microbatches
            self.microbatches += 1
            self.events.append(("B", number, len(self), self.head.grad is not None))

            def logged_run() -> None:
                if number == self.fails_at:
                    raise FloatingPointError(f"at microbatch {number} beside {len(self)}")
                run()
                self.events.append(("W", number, len(self), self.head.grad is not None))

            return logged_run

        return logged


def whole_model() -> tuple[Any, Any, Any]:
    """The model's stages, with the head at the end, and its data."""
    torch.manual_seed(0)
    stages = [torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Tanh()) for _ in range(STAGES)]
    stages[-1].register_parameter("head", torch.nn.Parameter(torch.randn(VOCAB, SIZE)))
    return stages, torch.randn(TOKENS, SIZE), torch.randint(0, VOCAB, (TOKENS,))


def pipeline_run(rank: int, name: str, limit: int | None, fails_at: int | None = None, into: bool = False) -> Any:
    """The rank's worst gradient, the loss's error, the queue's events, and what waits at the end.

    ``limit`` None: no queue, and torch cuts the backward of the plain loss.
    """
    modules, x, y = whole_model()
    reference = copy.deepcopy(torch.nn.Sequential(*modules)).double()
    loss = torch.nn.functional.cross_entropy(reference(x.double()) @ reference[-1].head.T, y)
    loss.backward()
    v = SCHEDULES[name]
    own = (rank, STAGES - 1 - rank) if v else (rank, rank + 2)
    head = modules[-1].head
    queue = Logged(limit or 1, head, fails_at)
    buffer = torch.zeros_like(head) if into else None

    def loss_of(hidden: Any, target: Any) -> Any:
        if limit is None:
            return linear_cross_entropy(hidden, head, target)
        value, weight_grad = linear_cross_entropy(hidden, head, target, accumulate_into=buffer, defer_weight_grad=True)
        queue.put(weight_grad)
        return value

    has_last, losses = STAGES - 1 in own, []
    stages = [
        torch.distributed.pipelining.PipelineStage(
            modules[stage], stage, STAGES, torch.device("cpu"), group=group_of(2),
            dw_builder=queue.dw_builder() if stage == STAGES - 1 and limit is not None else None,
        )
        for stage in own
    ]  # fmt: skip
    schedule = getattr(schedules, name)(stages, MICROBATCHES, loss_of)
    try:
        with queue:
            given = {"target": y, "losses": losses} if has_last else {}
            schedule.step(*([x] if rank == 0 else []), **given)
    except FloatingPointError as failed:
        return str(failed), len(queue)
    if buffer is not None:
        assert head.grad is None
        head.grad = buffer / MICROBATCHES  # the schedule has scaled the gradients that it knows
    made = [(p.grad, q.grad) for stage in own for p, q in _pairs(modules[stage], reference[stage])]
    worst = max(error(a.double().numpy(), b.numpy()) for a, b in made)
    value = torch.stack(losses).mean().item() - loss.item() if has_last else None
    return worst, value, queue.events, len(queue)


def _pairs(module: Any, reference: Any) -> Iterator[tuple[Any, Any]]:
    return zip(module.parameters(), reference.parameters(), strict=True)


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with Ranks(2, sizes=(2,)) as ranks:
        yield ranks


@pytest.mark.every_value
@pytest.mark.parametrize("limit", [None, 1, 2, MICROBATCHES])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_drains_the_queue(pool: Ranks, name: str, limit: int | None) -> None:
    """Gradients are the whole model's. The head's come in W, in the order of the microbatches, and never more than
    ``limit`` wait."""
    if not hasattr(schedules, name):
        pytest.skip(f"this torch has no {name}")
    made = pool.run(pipeline_run, name, limit)
    for worst, _, _, left in made:
        assert worst <= 4 * TINY["float32"]
        assert left == 0
    _, loss, events, _ = made[0 if SCHEDULES[name] else 1]
    assert abs(loss) <= TINY["float32"]
    if limit is None:
        assert not events
        return
    for kind in "BW":
        assert [number for what, number, *_ in events if what == kind] == list(range(MICROBATCHES))
    assert events[0] == ("B", 0, 1, False)  # B has made nothing of the head's gradient
    before = 0
    for what, _, waiting, _ in events:
        assert waiting <= limit
        if limit > 1:
            assert waiting == before + (1 if what == "B" else -1)
        before = waiting
    if name == "ScheduleInterleavedZeroBubble" and limit > 1:
        assert max(waiting for _, _, waiting, _ in events) == 2


def test_a_buffer_takes_the_gradients_of_w_alone(pool: Ranks) -> None:
    """torch's stages try the loss on made-up data first, which must not be added."""
    for worst, *_, left in pool.run(pipeline_run, "ScheduleZBVZeroBubble", 2, None, True):
        assert worst <= 4 * TINY["float32"]
        assert left == 0


def test_a_failed_step_leaves_nothing_in_the_queue() -> None:
    """The third W raises while the fourth's gradient waits. The other rank learns of it by a timeout."""
    with Ranks(2, timeout_s=3, sizes=(2,)) as ranks:
        other, made = ranks.outcomes(pipeline_run, "ScheduleInterleavedZeroBubble", MICROBATCHES, 2)
    assert made == ("at microbatch 2 beside 2", 0)
    assert isinstance(other, Failed)


def example_run(rank: int, path: str) -> list[float]:
    import runpy

    losses: list[float] = runpy.run_path(path)["train"](group_of(2), steps=25)
    return losses


@pytest.mark.slow  # the schedules above guard what it calls
def test_the_example_learns(pool: Ranks) -> None:
    path = str(Path(__file__).resolve().parent.parent / "examples" / "torch_pipeline_training.py")
    losses, none = pool.run(example_run, path)
    assert none == []
    assert losses[0] > 6.5
    assert losses[-1] < 3
