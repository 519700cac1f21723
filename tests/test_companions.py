"""The functions beside the loss: the padded gather, layers per pipeline stage, and the tables of saved tensors."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import every_implementation, in_jax

from logitless import layer_partition
from logitless.saved import SavedRow, SavedTensors
from logitless.tolerances import BOUND, TINY, error

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")

# ---------------------------------------------------------------------------------------------------------------------
# Layers per stage


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (48, 8, [6] * 8),
        (27, 8, [3, 4, 4, 4, 3, 3, 3, 3]),
        (1, 1, [1]),
        (3, 2, [2, 1]),
        (5, 3, [2, 2, 1]),
    ],
)
def test_layers_of_the_seed(layers: int, stages: int, expected: list[int]) -> None:
    assert layer_partition(layers, stages) == expected


def loads(counts: list[int], head: float, embedding: float) -> list[float]:
    fixed = [0.0] * len(counts)
    fixed[0] += embedding
    fixed[-1] += head
    return [count + cost for count, cost in zip(counts, fixed, strict=True)]


def smallest_load(layers: int, fixed: list[float], least: int) -> float:
    """The smallest possible largest load beside fixed ones, found by trying every load there can be."""
    candidates = sorted({cost + count for cost in fixed for count in range(least, layers + 1)})
    for largest in candidates:
        room = [int(np.floor(largest - cost + 1e-9)) for cost in fixed]
        if min(room) >= least and sum(room) >= layers:
            return largest
    raise AssertionError("nothing fits")


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 9), st.integers(0, 30), st.integers(0, 2), st.integers(0, 40), st.integers(0, 40))
def test_no_partition_has_a_smaller_largest_load(stages: int, more: int, least: int, head: int, embedding: int) -> None:
    layers, costs = stages * least + more, {"head_cost": head / 8, "embedding_cost": embedding / 8}
    counts = layer_partition(layers, stages, min_layers=least, **costs)
    assert sum(counts) == layers
    assert len(counts) == stages
    assert min(counts) >= least
    if more:
        fixed = loads([0] * stages, head / 8, embedding / 8)
        assert max(loads(counts, head / 8, embedding / 8)) == smallest_load(layers, fixed, least)
    if max(head, embedding) < 8 and stages > 1:
        assert max(counts) - min(counts) <= 1


def of_pairs(values: list[Any]) -> list[Any]:
    """The sums of the first and the last, the second and the last but one, and so on."""
    return [values[rank] + values[-1 - rank] for rank in range(len(values) // 2)]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), st.integers(0, 30), st.integers(0, 2), st.integers(0, 40), st.integers(0, 40))
def test_no_v_has_a_smaller_largest_load(ranks: int, more: int, least: int, head: int, embedding: int) -> None:
    """The loads of ranks, each of two stages. Then, within a rank, those of its stages."""
    layers, costs = 2 * ranks * least + more, {"head_cost": head / 8, "embedding_cost": embedding / 8}
    counts = layer_partition(layers, 2 * ranks, min_layers=least, v_shaped=True, **costs)
    assert sum(counts) == layers
    assert len(counts) == 2 * ranks
    assert min(counts) >= least
    fixed = loads([0] * 2 * ranks, head / 8, embedding / 8)
    made = loads(counts, head / 8, embedding / 8)
    if more:
        assert max(of_pairs(made)) == smallest_load(layers, of_pairs(fixed), 2 * least)
    for rank, own in enumerate(of_pairs(counts)):
        if own > 2 * least:
            assert max(made[rank], made[-1 - rank]) == smallest_load(own, [fixed[rank], fixed[-1 - rank]], least)
    if max(head, embedding) < 8:
        assert max(counts) - min(counts) <= 2


def test_a_v_beside_a_chain() -> None:
    """A head and an embedding of 2.4 layers on one rank: its two stages hold 5 layers, where the others hold 9."""
    costs = {"head_cost": 2.4, "embedding_cost": 2.4}
    chain = layer_partition(32, 8, **costs)
    v = layer_partition(32, 8, v_shaped=True, **costs)
    assert (of_pairs(chain), of_pairs(v)) == ([4, 9, 9, 10], [5, 9, 9, 9])
    assert layer_partition(27, 8, v_shaped=True) == [3, 4, 4, 4, 3, 3, 3, 3]


@needs_torch
def test_the_pairs_are_those_of_torchs_schedules() -> None:
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

    for ranks in (1, 2, 5):
        rank_of = generate_stage_to_rank_mapping(ranks, 2 * ranks, style="v")
        assert [rank_of[stage] for stage in range(2 * ranks)] == [*range(ranks), *reversed(range(ranks))]
    with pytest.raises(ValueError, match="stages: got 3, allowed beside v_shaped is an even number"):
        layer_partition(9, 3, v_shaped=True)


def test_partition_refuses() -> None:
    with pytest.raises(ValueError, match=r"layers: got 3, allowed is at least 4, min_layers · stages = 1 · 4"):
        layer_partition(3, 4)
    with pytest.raises(ValueError, match="stages: got 0, allowed is at least 1"):
        layer_partition(3, 0)
    with pytest.raises(TypeError, match=r"layers: got float 3\.0, allowed is an integer"):
        layer_partition(3.0, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="head_cost: got -1"):
        layer_partition(3, 1, head_cost=-1)


# ---------------------------------------------------------------------------------------------------------------------
# The padded gather


def gather(
    impl: Any, rows: Any, index: Any, upstream: Any, dtype: str, multiple: int, sizes: Any = None
) -> tuple[Any, Any]:
    """The result and the gradient of Σ result · upstream, as float64."""
    if impl.name.startswith("torch"):
        import torch

        from logitless.torch_impl import padded_index_gather

        leaf = impl.array(rows, dtype).requires_grad_()
        sizes = impl.array(sizes) if isinstance(sizes, np.ndarray) else sizes
        out = padded_index_gather(leaf, impl.array(index), pad_to_multiple=multiple, group_sizes=sizes)
        assert out.dtype == leaf.dtype
        (made,) = torch.autograd.grad(out, leaf, impl.array(upstream, dtype))
        return impl.numpy(out), impl.numpy(made)
    import jax

    from logitless.jax_impl import padded_index_gather as in_jax

    with impl.precision(dtype):
        ids, sizes = impl.array(index), impl.array(sizes) if isinstance(sizes, np.ndarray) else sizes
        out, backward = jax.vjp(
            lambda x: in_jax(x, ids, pad_to_multiple=multiple, group_sizes=sizes), impl.array(rows, dtype)
        )
        (made,) = backward(impl.array(upstream, dtype))
        return impl.numpy(out), impl.numpy(made)


@every_implementation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gather_and_its_gradient(impl: Any, dtype: str) -> None:
    """Every place has its row, and zeros follow. The gradient is summed over duplicates and rounded once. A second run
    gives the same bits."""
    from logitless.rounding import round_to

    rng = np.random.default_rng(0)
    rows, index = round_to(rng.standard_normal((30, 5)), dtype), rng.integers(0, 6, 45)
    upstream = round_to(rng.standard_normal((48, 5)), dtype)
    out, made = gather(impl, rows, index, upstream, dtype, 8)
    assert (out[:45] == rows[index]).all()
    assert (out[45:] == 0).all()
    assert out.shape == (48, 5)
    truth = np.zeros((30, 5))
    np.add.at(truth, index, upstream[:45].astype(np.float64))
    rounded = error(round_to(truth, dtype), truth)
    assert error(made, truth) <= BOUND["gather beside rounding, times"] * rounded + TINY["float32"]
    assert (made == gather(impl, rows, index, upstream, dtype, 8)[1]).all()


@every_implementation
def test_gather_at_its_edges(impl: Any) -> None:
    rows = np.arange(12.0).reshape(4, 3)
    out, made = gather(impl, rows, np.zeros(0, np.int64), np.zeros((0, 3)), "float32", 8)
    assert out.shape == (0, 3)
    assert (made == 0).all()
    for bad in (4, -1):
        if impl.on_gpu:
            out, made = gather(impl, rows, np.array([1, bad]), np.ones((2, 3)), "float32", 1)
            assert np.isnan(out[1]).all()
            assert (made == [[0] * 3, [1] * 3, [0] * 3, [0] * 3]).all()
        else:
            with pytest.raises(ValueError, match=f"index: got {bad} at position 1, allowed are 0 to 3"):
                gather(impl, rows, np.array([1, bad]), np.ones((2, 3)), "float32", 1)
    for multiple, words in ((0, "pad_to_multiple: got 0, allowed is at least 1"), (2.0, "pad_to_multiple: got 2")):
        with pytest.raises((ValueError, TypeError), match=words):
            gather(impl, rows, np.array([1]), np.ones((1, 3)), "float32", multiple)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"index: got shape \(1, 1\), allowed is \[M\]"):
        gather(impl, rows, np.array([[1]]), np.ones((1, 3)), "float32", 1)


@needs_torch
def test_gather_in_torch_keeps_the_index_alone() -> None:
    import torch

    from logitless.torch_impl import padded_index_gather, profile_saved_tensors

    rows, index = torch.randn(6, 4, dtype=torch.double, requires_grad=True), torch.tensor([5, 0, 5])
    for sizes in (None, [2, 1], torch.tensor([2, 1])):

        def gathered(x: Any, sizes: Any = sizes) -> Any:
            return padded_index_gather(x, index, pad_to_multiple=2, group_sizes=sizes)

        assert torch.autograd.gradcheck(gathered, rows)
        assert torch.autograd.gradgradcheck(gathered, rows)
    kept = profile_saved_tensors(lambda: padded_index_gather(rows, index, pad_to_multiple=4))
    assert (kept.activation_bytes, kept.weight_bytes) == (index.nbytes, 0)
    compiled = torch.compile(
        lambda x, i: padded_index_gather(x * 2, i, pad_to_multiple=4), fullgraph=True, backend="aot_eager"
    )
    out = compiled(rows, torch.tensor([5, 6, -1]))
    assert torch.equal(out[0], 2 * rows[5])
    assert out[1:3].isnan().all()
    (made,) = torch.autograd.grad(out[[0, 3]].sum(), rows)
    assert made.sum() == 8.0
    assert (made[5] == 2).all()


@needs_jax
def test_gather_in_jax_keeps_the_index_alone() -> None:
    import jax
    import jax.numpy as jnp

    from logitless.jax_impl import padded_index_gather, profile_saved_residuals

    rows, index = jnp.ones((6, 4)), jnp.array([5, 0, 5])
    kept = profile_saved_residuals(lambda x: padded_index_gather(x, index, pad_to_multiple=4).sum(), rows)
    assert kept.activation_bytes + kept.weight_bytes == index.nbytes
    out, backward = jax.vjp(
        jax.jit(lambda x: padded_index_gather(x, jnp.array([5, 6, -1]) + 0 * x[0, :3].astype(int))), rows
    )
    assert np.isnan(np.asarray(out)[1:]).all()
    (made,) = backward(jnp.ones_like(out))
    assert np.asarray(made).sum(1).tolist() == [0, 0, 0, 0, 0, 4]


def in_groups(rows: Any, index: Any, sizes: list[int], multiple: int) -> Any:
    """The truth: each group's rows, and zeros up to a multiple."""
    parts, first = [], 0
    for size in sizes:
        parts += [rows[index[first : first + size]], np.zeros((-size % multiple, *rows.shape[1:]))]
        first += size
    return np.concatenate(parts)


@pytest.mark.every_value(where=in_jax)
@every_implementation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("multiple", [1, 3, 16])
def test_gather_in_groups(impl: Any, dtype: str, multiple: int) -> None:
    """Each group begins at a multiple. Sizes may be numbers, or an array, of which only the length is known before."""
    from logitless.rounding import round_to

    rng, sizes = np.random.default_rng(1), [5, 0, 16, 1, 18, 0]
    rows, index = round_to(rng.standard_normal((9, 2, 3)), dtype), rng.integers(0, 9, 40).astype(np.int32)
    true = in_groups(rows, index, sizes, multiple)
    real = in_groups(np.ones(9), index, sizes, multiple) == 1
    bound = (40 + 6 * (multiple - 1)) // multiple * multiple
    for group_sizes, length in ((sizes, len(true)), (np.array(sizes), bound)):
        upstream = round_to(rng.standard_normal((length, 2, 3)), dtype)
        out, made = gather(impl, rows, index, upstream, dtype, multiple, group_sizes)
        assert out.shape == upstream.shape
        assert (out[: len(true)] == true).all()
        assert (out[len(true) :] == 0).all()
        gradient = np.zeros((9, 2, 3))
        np.add.at(gradient, index, upstream[: len(true)][real].astype(np.float64))
        rounded = error(round_to(gradient, dtype), gradient)
        assert error(made, gradient) <= BOUND["gather beside rounding, times"] * rounded + TINY["float32"]


@every_implementation
def test_group_sizes_that_are_wrong(impl: Any) -> None:
    rows, index, upstream = np.ones((4, 3)), np.array([1, 2, 3]), np.ones((4, 3))
    for sizes, words in (
        ([2, 2], "got a sum of 4, allowed is index's M = 3"),
        ([4, -1], "got -1, allowed is at least"),
    ):
        with pytest.raises(ValueError, match=f"group_sizes: {words}"):
            gather(impl, rows, index, upstream, "float32", 1, sizes)
        if not impl.on_gpu:
            with pytest.raises(ValueError, match=f"group_sizes: {words}"):
                gather(impl, rows, index, upstream, "float32", 1, np.array(sizes))
    for group_sizes, kind, words in (
        ([1.5, 1.5], TypeError, r"got \[1.5, 1.5\], allowed are integers"),
        ([], TypeError, r"got \[\], allowed are integers, at least one"),
        (np.ones((1, 1), np.int32), ValueError, r"got shape \(1, 1\), allowed is \[G\]"),
        (np.ones(3, np.float32), TypeError, "got dtype float32, allowed are int32, int64"),
        ("ab", TypeError, "got str"),
    ):
        with pytest.raises(kind, match=f"group_sizes: {words}"):
            gather(impl, rows, index, upstream, "float32", 1, group_sizes)


@pytest.mark.every_value(each="dtype")
@needs_torch
@pytest.mark.parametrize("looked_at", [True, False], ids=["looked_at", "not_waited_for"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_of_a_gather_in_torch(dtype: str, index_dtype: str, grouped: bool, looked_at: bool) -> None:
    """The forward takes at most 1.25 times its result, and the backward no copy of the source beside the gradient."""
    import torch

    from logitless.torch_impl.gather import GatherFunction, padded_index_gather
    from logitless.torch_impl.memory import peak_scratch_bytes

    source = torch.randn(12000, 512).to(getattr(torch, dtype)).requires_grad_()
    narrow = source.detach()[:, :64].contiguous()
    index = torch.randint(0, 12000, (12000,)).to(getattr(torch, index_dtype))
    sizes = torch.tensor([5000, 0, 7000]) if grouped else None

    def forward(source: Any) -> Any:
        if looked_at:
            return padded_index_gather(source, index, pad_to_multiple=100, group_sizes=sizes)
        # What a GPU's call does, where nothing waits for the index.
        made: Any = GatherFunction.apply(source, index, sizes, (100, 12200 if grouped else 12000), torch.nan)
        return made

    most = 1.01 if looked_at and not grouped else 1.25
    assert peak_scratch_bytes(lambda: forward(narrow)) <= most * forward(narrow).nbytes
    out = forward(source)
    upstream = torch.randn_like(out)
    backward = peak_scratch_bytes(lambda: torch.autograd.grad(out, source, upstream, retain_graph=True))
    assert backward <= (1 + 0.4) * source.nbytes


@needs_jax
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_of_a_gather_in_jax(dtype: str, grouped: bool) -> None:
    import jax

    from logitless.jax_impl import padded_index_gather
    from logitless.jax_impl.memory import temp_bytes

    source, index = jax.ShapeDtypeStruct((8000, 512), dtype), jax.ShapeDtypeStruct((8000,), "int32")
    sizes = jax.ShapeDtypeStruct((8,), "int32") if grouped else None

    def forward(x: Any, i: Any, s: Any) -> Any:
        return padded_index_gather(x, i, pad_to_multiple=128, group_sizes=s)

    def backward(x: Any, i: Any, s: Any, upstream: Any) -> Any:
        return jax.vjp(lambda x: forward(x, i, s), x)[1](upstream)[0]

    out = jax.eval_shape(forward, source, index, sizes)
    itemsize = out.dtype.itemsize
    assert temp_bytes(forward, source, index, sizes) <= 0.25 * out.size * itemsize
    assert temp_bytes(backward, source, index, sizes, out) <= 0.5 * source.size * itemsize


@needs_torch
def test_an_index_keeps_its_dtype_in_torch() -> None:
    import torch

    from logitless.torch_impl import padded_index_gather, profile_saved_tensors

    rows, index = torch.randn(6, 4, requires_grad=True), torch.tensor([5, 0, 5], dtype=torch.int32)
    kept = profile_saved_tensors(lambda: padded_index_gather(rows, index, pad_to_multiple=4))
    assert kept.activation_bytes == 3 * 4


@needs_jax
def test_an_index_keeps_its_dtype_in_jax() -> None:
    """Narrowed to int32, a place in more than 2³¹ rows would be another one."""
    import jax

    from logitless.jax_impl import padded_index_gather

    with jax.enable_x64(True):
        source, index = jax.ShapeDtypeStruct((2**31 + 8, 1), "float32"), jax.ShapeDtypeStruct((3,), "int64")
        made = str(jax.make_jaxpr(padded_index_gather)(source, index))
    assert "i64[3]" in made
    assert "i32" not in made


@needs_torch
def test_wrong_sizes_that_nobody_has_looked_at() -> None:
    import torch

    from logitless.torch_impl import padded_index_gather

    compiled = torch.compile(
        lambda x, i, s: padded_index_gather(x, i, pad_to_multiple=4, group_sizes=s), fullgraph=True, backend="aot_eager"
    )
    rows, index = torch.randn(6, 4, requires_grad=True), torch.tensor([5, 0, 5])
    right = compiled(rows, index, torch.tensor([1, 2]))
    assert torch.equal(right[[0, 4, 5]], rows[index])
    assert not right[[1, 2, 3, 6, 7]].any()
    for wrong in ([1, 3], [1, 1], [4, -1], [10**9, 2]):
        out = compiled(rows, index, torch.tensor(wrong))
        assert out.isnan().any()
        assert not (out == rows[index][:, None]).all(-1).any()
        (made,) = torch.autograd.grad(out.nansum(), rows)
        assert not made.any()


# ---------------------------------------------------------------------------------------------------------------------
# What is kept


def test_rows_add_up() -> None:
    made = SavedTensors.of([("a", 3, False), ("b", 5, True), ("a", 4, True)])
    assert made.rows == (SavedRow("a", 2, 3, 4), SavedRow("b", 1, 0, 5))
    assert (made.activation_bytes, made.weight_bytes) == (3, 9)
    pytest.importorskip("rich", reason="the table is rich's")
    assert list(made.__rich__().columns[0].cells) == ["a", "b", "all"]


@needs_torch
def test_saved_tensors_by_layer() -> None:
    """Two linear layers around a relu each save their input. It is listed once, although two operations share it, and
    apart from the weights."""
    import torch
    from torch import nn

    from logitless.torch_impl import LinearCrossEntropy, profile_saved_tensors

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
            self.head = LinearCrossEntropy(8, 100)

        def forward(self, x: Any, y: Any) -> Any:
            unused = torch.exp(self.up(x))  # its graph dies with it
            del unused
            return self.head(self.down(torch.relu(self.up(x)).view(4, 32)), y)

    model, x, y = Model(), torch.randn(4, 8), torch.randint(0, 100, (4,))
    made = profile_saved_tensors(model, x, y)
    rows = {row.where: row for row in made.rows}
    assert rows["up"].activation_bytes == x.nbytes
    assert rows[""].activation_bytes == 4 * 4 * 32
    assert rows["down"] == SavedRow("down", 1, 0, model.down.weight.nbytes)
    head = rows["head"]
    assert head.weight_bytes == model.head.weight.nbytes
    # hidden and target; dX and dW, which wait in float32; and a few numbers per token.
    least = 4 * 4 * 8 + 8 * 4 + 4 * 4 * 8 + 4 * 100 * 8
    assert least <= head.activation_bytes <= least + 4 * 4 * 4 + 64
    assert made.activation_bytes == sum(row.activation_bytes for row in made.rows)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


D, HEADS, B, T = 32, 4, 2, 8


def transformer_block() -> Any:
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(D), nn.LayerNorm(D)
            self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
            self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(self.before(x)).view(B, T, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            x = x + self.out(mixed.reshape(B, T, D))
            return x + self.down(functional.gelu(self.up(self.between(x))))

    return Block()


# Of a token, in elements: x, what comes out of the norms (2), q k v, the heads' result, x in the middle, and the
# activation's argument and result; then mean and deviation of both norms, and a head's logsumexp.
WIDE, NARROW = 2 * D + 2 * D + 3 * D + D + 2 * 4 * D, 4 + HEADS


@needs_torch
@pytest.mark.parametrize("way", ["plain", "input requires grad", "frozen", "checkpoint", "autocast"])
def test_a_whole_transformer_block(way: str) -> None:
    """Every byte that a block keeps is an activation or a weight, as counted by hand."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from logitless.torch_impl import profile_saved_tensors

    block, x = transformer_block(), torch.randn(B, T, D, requires_grad=way not in ("plain", "autocast"))
    products, norms = 12 * D * D, 4 * D

    def run(x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            return checkpoint(block, x, use_reentrant=False) if way == "checkpoint" else block(x)

    if way == "frozen":
        block.requires_grad_(False)
    made = profile_saved_tensors(run, x, module=block)
    activations, weights = 4 * B * T * (WIDE + NARROW), 4 * (products + norms)
    if way == "checkpoint":  # the input alone
        activations, weights = 4 * B * T * D, 0
    if way == "frozen":  # a frozen product does not keep its input; the attention keeps its own result
        activations -= 4 * B * T * (2 * D + 4 * D)
    if way == "autocast":  # what the norms read stays wide
        activations, weights = 2 * B * T * (WIDE + 2 * D) + 4 * B * T * NARROW, 2 * products + 4 * norms
    assert (made.activation_bytes, made.weight_bytes) == (activations, weights)


@needs_torch
def test_the_layers_of_a_block_are_added_up() -> None:
    import torch

    from logitless.torch_impl import profile_saved_tensors

    model = torch.nn.Sequential(transformer_block(), transformer_block())
    made = profile_saved_tensors(model, torch.randn(B, T, D))
    blocks = made.to_depth(1)
    assert [row.where for row in blocks.rows] == ["0", "1"]
    weights = 4 * (12 * D * D + 4 * D)
    assert [row.activation_bytes for row in blocks.rows] == [4 * B * T * (WIDE + NARROW)] * 2
    assert [row.weight_bytes for row in blocks.rows] == [weights] * 2
    assert made.to_depth(2) == made
    assert SavedTensors(()).to_depth(1) == SavedTensors(())
    with pytest.raises(ValueError, match="depth: got 0, allowed is at least 1"):
        made.to_depth(0)
    with pytest.raises(TypeError, match=r"depth: got float 1\.0, allowed is an integer"):
        made.to_depth(1.0)  # type: ignore[arg-type]


@needs_jax
def test_a_whole_transformer_block_in_jax() -> None:
    """The block's input is an activation, if it is said which arguments are weights. The rest stays as it is."""
    import jax
    import jax.numpy as jnp

    from logitless.jax_impl import profile_saved_residuals

    shapes = {"qkv": (D, 3 * D), "out": (D, D), "up": (D, 4 * D), "down": (4 * D, D)}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    def block(weights: Any, x: Any) -> Any:
        q, k, v = jnp.moveaxis((x @ weights["qkv"]).reshape(B, T, 3, HEADS, D // HEADS), 2, 0)
        x = x + jax.nn.dot_product_attention(q, k, v).reshape(B, T, D) @ weights["out"]
        return x + jnp.tanh(x @ weights["up"]) @ weights["down"]

    arguments = weights, jax.ShapeDtypeStruct((B, T, D), jnp.float32)
    every = profile_saved_residuals(block, *arguments)
    split = profile_saved_residuals(block, *arguments, weight_argnums=0)
    own = 4 * 12 * D * D
    assert split.weight_bytes == own
    assert every.weight_bytes == own + 4 * B * T * D
    assert split.weight_bytes + split.activation_bytes == every.weight_bytes + every.activation_bytes
    assert {row.where: row.activation_bytes for row in split.rows}["x"] == 4 * B * T * D
    several = profile_saved_residuals(lambda *given: block(*given), *arguments, weight_argnums=(0,))
    assert (several.weight_bytes, several.activation_bytes) == (own, split.activation_bytes)
    for wrong, kind in ((2, ValueError), (-1, ValueError), ("x", TypeError), (True, TypeError)):
        with pytest.raises(kind, match="weight_argnums: got "):
            profile_saved_residuals(block, *arguments, weight_argnums=wrong)


@pytest.mark.parametrize("framework", [pytest.param("torch", marks=needs_torch), pytest.param("jax", marks=needs_jax)])
def test_the_share_of_the_loss(framework: str) -> None:
    """Full logits are kept in float32 at least once. Without them, what is kept is as large as the gradients."""
    import importlib

    tokens, size, vocab = 64, 8, 4000
    x, w = np.ones((tokens, size), np.float32), np.ones((vocab, size), np.float32)
    y = np.arange(tokens, dtype=np.int32)
    if framework == "torch":
        import torch

        x, w, y = (torch.tensor(array) for array in (x, w, y))
    made = importlib.import_module(f"logitless.{framework}_impl").profile_losses(x, w, y)
    assert made["full logits"].activation_bytes >= 4 * tokens * vocab
    gradients = 4 * (tokens + vocab) * size
    assert gradients <= made["logitless"].activation_bytes <= gradients + 64 * tokens
