"""The model of more GPUs: its collectives are those that two ranks make, and the page shows what the program says."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the model reads PyTorch's promise of what a rank holds")

import torch.distributed as dist  # noqa: E402
from ranks import Ranks, group_of  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench import scale  # noqa: E402
from bench.scale import Collective, Split, Step  # noqa: E402
from bench.shapes import Shape  # noqa: E402
from logitless import ChunkPlan, plan  # noqa: E402
from logitless.torch_impl import global_normalizer, linear_cross_entropy  # noqa: E402
from logitless.torch_impl.distributed import sharding  # noqa: E402

PAGE = Path(__file__).resolve().parent.parent / "docs" / "scale.md"
SHAPE = Shape(26, 32, 46)  # the last chunk is short
# Of both names that PyTorch has for two of them, and what of a call has the size that the model counts.
KINDS = {
    "all_reduce": ("all-reduce", 0),
    "all_gather": ("agreement", 1),
    "all_gather_single": ("all-gather", 0),
    "all_gather_into_tensor": ("all-gather", 0),
    "reduce_scatter_single": ("reduce-scatter", 1),
    "reduce_scatter_tensor": ("reduce-scatter", 1),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with Ranks(2, sizes=(2,)) as ranks:
        yield ranks


def collectives_run(rank: int, split: Split, chosen: ChunkPlan) -> list[tuple[str, int, bool]]:
    """Kind, bytes and whether the host goes on, of every collective of a forward and a backward; "dW" where dW is
    made."""
    from logitless.torch_impl.kernels.products import GradientProducts

    made: list[tuple[str, int, bool]] = []

    def noted(name: str, call: Any) -> Any:
        kind, place = KINDS[name]

        def run(*arguments: Any, **named: Any) -> Any:
            made.append((kind, arguments[place].nbytes, named.get("async_op", False)))
            return call(*arguments, **named)

        return run

    def add_weight(*arguments: Any) -> None:
        made.append(("dW", 0, False))
        weight(*arguments)

    torch.manual_seed(0)
    group, vocab = group_of(2), SHAPE.vocab // split.tensor
    x = torch.randn(SHAPE.tokens // (split.tensor if split.sequence else 1), SHAPE.hidden).bfloat16().requires_grad_()
    w, y = torch.randn(vocab, SHAPE.hidden).bfloat16().requires_grad_(), torch.randint(0, SHAPE.vocab, (SHAPE.tokens,))
    options: dict[str, Any] = {"process_group": group, "sequence_parallel": split.sequence}
    with pytest.MonkeyPatch.context() as patch:
        for name in KINDS:
            if hasattr(dist, name):
                patch.setattr(dist, name, noted(name, getattr(dist, name)))
        weight = GradientProducts.add_weight
        patch.setattr(GradientProducts, "add_weight", lambda *arguments: add_weight(*arguments))
        if split.tensor == 1:
            options = {"normalizer": global_normalizer(y, group)}
        linear_cross_entropy(x, w, y, backend="triton", plan=chosen, **options).backward()
    return made


@pytest.mark.case(26)
@pytest.mark.parametrize("chunk", [26, 8])
@pytest.mark.parametrize("split", [Split(2), Split(2, sequence=True), Split(data=2)], ids=str)
def test_the_collectives_are_those_of_two_ranks(pool: Ranks, split: Split, chunk: int) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    step = Step(SHAPE, split)
    sizes = SHAPE.sizes() | {"vocab": SHAPE.vocab // split.tensor}
    chosen = plan(**sizes, fused=True, order="tokens", chunk=chunk)
    vars(step)["plan"] = chosen  # not what it would choose for so few tokens
    expected = [one for one in step.collectives() if one.ours]
    for made in pool.run(collectives_run, split, chosen):
        sent = [one for one in made if one[0] not in ("dW", "agreement")]
        for kind, beside in {(one.kind, one.beside) for one in expected} | {(kind, "nothing") for kind, *_ in sent}:
            listed = [one for one in expected if (one.kind, one.beside) == (kind, beside)]
            of_kind = [size for found, size, goes_on in sent if (found, goes_on) == (kind, beside != "nothing")]
            assert len(of_kind) == sum(one.count for one in listed), (kind, beside)
            assert sum(of_kind) == sum(one.count * one.size for one in listed), (kind, beside)
        # A dX that runs beside dW is sent right before dW is made.
        for place, (*_, goes_on) in enumerate(made):
            assert not goes_on or [kind for kind, *_ in made[place + 1 : place + 2]] == ["dW"]
        agreed = [size for kind, size, _ in made if kind == "agreement"]
        assert agreed == [8 * (2 + sharding.FACTS)] * (split.tensor > 1)


def test_a_ring_by_hand() -> None:
    """450 MB take 1 ms over NVLink; 400 and 50 GB/s leave a host."""
    cases = {(2, 1): 450e9, (4, 2): 450e9, (16, 1): 400e9, (32, 2): 200e9, (8, 8): 50e9, (4, 32): 50e9}
    assert {group: scale.bandwidth(*group) for group in cases} == cases
    for kind, share in (("all-reduce", 1.5), ("all-gather", 0.75), ("reduce-scatter", 0.75), ("send", 1.0)):
        one = Collective("", kind, 3, 450_000_000, ranks=4, beside_s=5e-4)
        assert one.seconds == pytest.approx(2e-5 + share * 1e-3)
        assert one.waits_s == pytest.approx(3 * (share * 1e-3 - 4.8e-4))


def test_a_replica_has_the_bytes_of_its_parts() -> None:
    """A weight of [V / T, D], and the promise of a plan for it with what the ranks exchange."""
    whole, part = Step(Shape(8192, 512, 4096)), Step(Shape(8192, 512, 4096), Split(4, sequence=True))
    assert (whole.plan.vocab, part.plan.vocab) == (4096, 1024)
    assert whole.scratch_bytes == whole.plan.scratch_bytes
    matrices = 8192 * 512 * (4 + 4 + 2)  # dX, dX by token, the gathered hidden states
    assert part.scratch_bytes - part.plan.scratch_bytes - matrices == 4 * 3 * 8 * 4 * 8192  # records


def test_plans_of_the_page_are_those_that_the_model_knows() -> None:
    for head in scale.HEADS:
        for split in scale.SPLITS:
            step = scale.step_of(head, split, 1024)
            assert step is not None
            assert step.plan.order == "tokens"


def test_the_page_shows_what_the_program_says() -> None:
    page, tables = PAGE.read_text(), scale.tables()
    for name, table in tables.items():
        assert f"](figures/{name}.md)" in page
        shown = (PAGE.parent / "figures" / f"{name}.md").read_text()
        assert shown == table, "run python -m bench scale, and see whether the words of docs/scale.md still hold"
    all_rows = tables["scale_measured"]
    many_tokens = "\n".join(row for row in all_rows.splitlines() if "| 16384 ×" in row)
    (low, high), (low_many, high_many) = map(_errors, (all_rows, many_tokens))
    assert f"between {low} and {high}; those of 16,384 tokens by {low_many} to {high_many}." in " ".join(page.split())
    assert f"{low} to {high}, with 16,384 tokens {low_many} to {high_many};" in (PAGE.parent / "asked.md").read_text()


def _errors(table: str) -> tuple[str, str]:
    """The smallest and the largest, as the pages write them."""
    errors = sorted(map(float, re.findall(r"([+-][\d.]+) %", table)))
    low, high = (f"{error:+.1f} %".replace("-", "−") for error in (errors[0], errors[-1]))
    return low, high
