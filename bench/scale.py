"""A model of the head's time and bytes on 8 to 1024 GPUs: ``python -m bench scale`` writes the tables of docs/scale.md.

It needs no GPU. docs/scale.md has the formulas. A step is what the head does of a training step: the loss, dX and dW of
every micro-batch, and the sum of dW over the data-parallel ranks. Nothing is fitted to the runs of two GPUs.

Ranks lie in the order tensor, data, pipeline, 8 to a host. Sequence parallelism cuts the hidden states over the tensor
ranks, so it has no ranks of its own. Operands are bfloat16.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.registry import Results, register
from bench.report import FIGURES, Rows, markdown, mib, read, sizes_of
from bench.shapes import MIB, Shape

if TYPE_CHECKING:
    from logitless import ChunkPlan

# Bytes or seconds, and where the number is from.
KNOWN = {
    "NVLink of a GPU, one way": (450e9, "450 GB/s", "published by NVIDIA: an H200 SXM has 900 GB/s both ways together"),
    "network of a GPU, one way": (50e9, "50 GB/s", "published by NVIDIA: a DGX H200 has 400 Gbit/s for each GPU"),
    "a collective of a few bytes": (20e-6, "20 µs", "assumed, not measured"),
}  # fmt: skip
NVLINK, NETWORK, LATENCY = (known[0] for known in KNOWN.values())
HOST = 8  # GPUs
ITEM, WIDE = 2, 4  # bytes of a bfloat16, and of what is summed


@functools.cache
def products_rate() -> float:
    """Flops a second of one GPU's bare products: the median of the measured floors."""
    floors = [row for row in read("gpu_check.json")["rows"] if row["variant"] == "floor"]
    rates: list[float] = [
        6e3 * math.prod(row[name] for name in ("tokens", "hidden", "vocab")) / row["time_ms"] for row in floors
    ]
    return statistics.median(rates)


@dataclasses.dataclass(frozen=True)
class Split:
    """How many ranks there are of each kind. The head is on the last pipeline stage."""

    tensor: int = 1
    sequence: bool = False
    """Whether hidden and dX are cut over the tensor ranks."""
    pipeline: int = 1
    data: int = 1

    def __str__(self) -> str:
        tensor = [f"tensor {self.tensor}"] * (self.tensor > 1) + ["sequence"] * self.sequence
        return ", ".join([*tensor, *[f"pipeline {self.pipeline}"] * (self.pipeline > 1), "data"])


def bandwidth(ranks: int, stride: int) -> float:
    """Bytes a second, one way, of a member of a group of ``ranks`` that lie ``stride`` apart.

    A ring inside a host has NVLink. One that leaves it has the network of all its members in a host.
    """
    inside = ranks * stride <= HOST
    return NVLINK if inside else min(NVLINK, max(1, HOST // stride) * NETWORK)


@dataclasses.dataclass(frozen=True)
class Collective:
    what: str
    kind: str
    count: int
    """In a micro-batch; of dW's sum in a step."""
    size: int
    """Bytes of one: of what is summed, or of what is there once it is gathered."""
    ranks: int
    stride: int = 1
    ours: bool = True
    """Whether the loss makes it, or the program that trains."""
    beside: str = "nothing"
    beside_s: float = 0.0
    """How long that takes: what is hidden of each."""

    @property
    def seconds(self) -> float:
        """Of one: on a ring a sum that all get sends 2 (R − 1) / R of its bytes, a gather or scatter half of that."""
        share = {"send": 1.0, "all-reduce": 2 - 2 / self.ranks}.get(self.kind, 1 - 1 / self.ranks)
        return LATENCY + share * self.size / bandwidth(self.ranks, self.stride)

    @property
    def waits_s(self) -> float:
        return self.count * max(0.0, self.seconds - self.beside_s)


@dataclasses.dataclass(frozen=True)
class Step:
    """The head in a micro-batch of ``shape.tokens`` tokens, on the ranks that share them."""

    shape: Shape
    split: Split = Split()
    framework: str = "torch"
    prefer: Any = "balanced"

    @functools.cached_property
    def plan(self) -> ChunkPlan:
        """For a rank's part of the vocabulary, the largest one, as the calls choose it."""
        from logitless import plan

        jax, tensor = self.framework == "jax", self.split.tensor
        sizes: dict[str, Any] = self.shape.sizes() | {"vocab": -(-self.shape.vocab // tensor)}
        return plan(**sizes, fused=True, padded=jax, prefer=self.prefer, lends=tensor == 1)

    @property
    def products_s(self) -> float:
        sizes = self.plan
        return 6 * sizes.tokens * sizes.hidden * sizes.vocab * sizes.relative_cost("gpu") / products_rate()

    def collectives(self) -> Iterator[Collective]:
        """In order. In PyTorch a chunk's dX is sent while its dW is made; XLA is not asked to overlap anything."""
        split, sizes, jax = self.split, self.plan, self.framework == "jax"
        rows, chunks, matrix = sizes.token_chunk, len(sizes.token_slices), sizes.tokens * sizes.hidden
        over_data: dict[str, Any] = {"ranks": split.data, "stride": split.tensor}
        if split.data > 1:
            yield Collective("valid tokens", "all-reduce", 1, 2 * WIDE, **over_data)
        if split.tensor > 1:
            tensor = functools.partial(Collective, ranks=split.tensor)
            if split.sequence:
                yield tensor("hidden", "all-gather", 1, matrix * ITEM)
            if jax:
                yield tensor("targets' logits", "all-reduce", 1, sizes.tokens * WIDE)
            yield tensor("anchors", "all-reduce", chunks, rows * WIDE)
            if jax:
                yield tensor("sums", "all-reduce", chunks, rows * WIDE)
            else:
                yield tensor("records", "all-gather", chunks, 2 * rows * WIDE * split.tensor)
            count = 1 if jax or split.sequence else chunks
            dw: dict[str, Any] = {} if jax else {"beside": "dW of its chunk", "beside_s": self.products_s / 3 / chunks}
            kind = "reduce-scatter" if split.sequence else "all-reduce"
            yield tensor("dX", kind, count, matrix * WIDE // count, **dw)
        if split.pipeline > 1:
            stages: dict[str, Any] = {"ranks": split.pipeline, "stride": split.tensor * split.data, "ours": False}
            size = matrix * ITEM // (split.tensor if split.sequence else 1)
            for what in ("hidden from the stage before", "dX to the stage before"):
                yield Collective(what, "send", 1, size, **stages, beside="other micro-batches")
        if split.data > 1:
            size = sizes.vocab * sizes.hidden * ITEM
            yield Collective("dW", "all-reduce", 1, size, **over_data, ours=False, beside="the layers' backward")

    @property
    def time_s(self) -> float:
        """The products, and what the loss waits for."""
        return self.products_s + sum(one.waits_s for one in self.collectives() if one.ours)

    @property
    def sum_s(self) -> float:
        """dW's sum over the data-parallel ranks."""
        return sum(one.seconds for one in self.collectives() if one.what == "dW")

    @property
    def scratch_bytes(self) -> int:
        """The promise of a rank's plan, and of what it exchanges."""
        from logitless.torch_impl.distributed.parallel import Shard

        split, sizes = self.split, self.plan
        shard = Shard(self.shape.vocab, ranks=split.tensor, sequence_parallel=split.sequence)
        more = shard.scratch_bytes(sizes.tokens, sizes.hidden, ITEM) if split.tensor > 1 else 0
        return sizes.scratch_bytes + more


def run_of(row: dict[str, Any]) -> tuple[Step, float]:
    """What the model says of a measured row: the step, and its seconds."""
    from bench.sharded_torch import ALONE, BODY

    framework, kind = row.get("framework", "jax"), row.get("variant") or row["kind"]
    ranks = 1 if kind in ALONE else row.get("ranks") or row["devices"]
    data = ranks if kind.endswith("data") else 1
    tokens = row["tokens"] // (data if framework == "jax" else 1)
    split = Split(ranks // data, kind == "sequence" and ranks > 1, data=data)
    # Rows that name no plan are from before "balanced" was the default.
    step = Step(Shape(tokens, row["hidden"], row["vocab"]), split, framework, row.get("plan", "fast"))
    if not kind.startswith("model"):
        return step, step.time_s + step.sum_s
    layer_s = 2 * tokens * row["hidden"] ** 2 / products_rate()
    backward_s = (2 * BODY - 1) * layer_s  # the first layer's input needs no gradient
    return step, step.time_s + BODY * layer_s + backward_s + max(0.0, step.sum_s - backward_s)


def measured_table(rows: Rows) -> str:
    """Every row of the runs of two GPUs. A whole model's scratch has activations, of which the model knows nothing."""
    cells, alone = [], (1.0, 1.0)
    for row in rows:
        step, seconds = run_of(row)
        kind, data = row.get("variant") or row["kind"], step.split.data
        times = 1e3 * seconds, row["time_ms"]
        alone = times if data * step.split.tensor == 1 else alone
        speeds = (f"{data * one / time:.2f}" for one, time in zip(alone, times, strict=True))
        found = row["scratch_mib"] if "scratch_mib" in row else row["temp_bytes"] / MIB
        scratch = mib(step.scratch_bytes), f"{found:.0f}"
        cells.append([
            step.framework, sizes_of(row), kind, data * step.split.tensor, *(f"{time:.1f}" for time in times),
            f"{100 * (times[0] / times[1] - 1):+.1f} %", *speeds,
            *(("–", "–") if kind.startswith("model") else scratch),
        ])  # fmt: skip
    both = "time [ms]", "× one GPU's speed", "scratch [MiB]"
    time, speed, memory = ((f"predicted {name}", f"measured {name}") for name in both)
    columns = "framework", "tokens × hidden × vocab", "split", "GPUs", *time, "error", *speed, *memory
    return markdown(columns, cells)


class Head(NamedTuple):
    name: str
    hidden: int
    vocab: int
    layers: int
    layer_weights: float
    """That a token is multiplied by in a layer; of experts those that it goes to."""


HEADS = (
    Head("Llama 3 8B", 4096, 128256, 32, 218e6),
    Head("Llama 3 70B", 8192, 128256, 80, 856e6),
    Head("DeepSeek-V3", 7168, 129280, 61, 585e6),
    Head("Gemma 2 2B", 2304, 256000, 26, 78e6),
)
SPLITS = Split(), Split(2), Split(8), Split(8, True), Split(8, True, 4), Split(8, True, 8), Split(16, True)
GPUS = (8, 64, 256, 1024)
TOKENS = 4096  # of a micro-batch, for each tensor rank


def step_of(head: Head, split: Split, gpus: int) -> Step | None:
    """On so many GPUs, if they are enough."""
    data = gpus // (split.tensor * split.pipeline)
    shape = Shape(TOKENS * split.tensor, head.hidden, head.vocab)
    return Step(shape, dataclasses.replace(split, data=data)) if data else None


def balance(head: Head, stages: int) -> float:
    """The mean load of a stage over the largest, with layers placed by :func:`layer_partition`."""
    from logitless import layer_partition

    cost = head.hidden * head.vocab / head.layer_weights
    counts = layer_partition(head.layers, stages, head_cost=cost, embedding_cost=0, min_layers=0)
    return (head.layers + cost) / stages / max(*counts, counts[-1] + cost)


def predictions_table() -> str:
    cells = []
    for head in HEADS:
        alone = Step(Shape(TOKENS, head.hidden, head.vocab)).products_s
        for split in SPLITS:
            steps = [step for gpus in GPUS if (step := step_of(head, split, gpus))]
            last, missing = steps[-1], ["–"] * (len(GPUS) - len(steps))
            # As many micro-batches as stages: so many times the head's time, and dW's sum once.
            with_sum = (alone / (step.time_s + step.sum_s / split.pipeline) for step in steps)
            held = 2 * last.plan.vocab * head.hidden * ITEM + last.scratch_bytes
            cells.append([
                head.name, split, mib(held), f"{1e3 * last.products_s:.1f}",
                f"{1e3 * (last.time_s - last.products_s):.2f}", f"{100 * alone / last.time_s:.0f}",
                " / ".join([*missing, *(f"{1e3 * step.sum_s:.1f}" for step in steps)]),
                " / ".join([*missing, *(f"{100 * share:.0f}" for share in with_sum)]),
                "–" if split.pipeline == 1 else f"{100 * balance(head, split.pipeline):.0f}",
            ])  # fmt: skip
    at = f"on {' / '.join(map(str, GPUS))} GPUs"
    columns = (
        "head", "split", "held [MiB]", "products [ms]", "waits [ms]", "efficiency [%]", f"dW's sum [ms] {at}",
        f"efficiency with it [%] {at}", "balance of stages [%]",
    )  # fmt: skip
    return markdown(columns, cells)


def collectives_table() -> str:
    """Of the first head on 64 GPUs."""
    steps = [step for split in SPLITS if (step := step_of(HEADS[0], split, 64))]
    columns = "split", "what", "collective", "made by", "ranks", "times", "MiB each", "ms each", "beside"
    return markdown(columns, (
        [step.split, one.what, one.kind, "the loss" if one.ours else "the trainer", one.ranks, one.count,
         f"{one.size / MIB:.2f}" if one.size > 99 else f"{one.size} bytes", f"{1e3 * one.seconds:.2f}", one.beside]
        for step in steps for one in step.collectives()
    ))  # fmt: skip


def tables() -> dict[str, str]:
    """By their names in docs/figures/."""
    rows = [row for file in ("sharded.json", "sharded_jax.json") for row in read(file)["rows"]]
    floors = "measured on one H200: the median of the floors in `bench/results/gpu_check.json`"
    numbers = [["bare products of a GPU", f"{products_rate() / 1e12:.0f} TFLOP/s", floors]]
    numbers += [[name, shown, source] for name, (_, shown, source) in KNOWN.items()]
    return {
        "scale_numbers": markdown(("number", "value", "from"), numbers),
        "scale_measured": measured_table(rows),
        "scale_collectives": collectives_table(),
        "scale": predictions_table(),
    }


@register("a model of time and bytes for 8 to 1024 GPUs, into docs/figures/; needs no GPU", file=None)
def run(options: argparse.Namespace, results: Results) -> None:
    for name, table in tables().items():
        (FIGURES / f"{name}.md").write_text(table)
    print(f"written to {FIGURES}")
