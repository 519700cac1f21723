"""cut-cross-entropy's names (torch_impl.integrations.cce), against full logits in float64 and, where the package is
installed, against its own functions on plain operations."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from ranks import Failed, Ranks  # noqa: E402

from logitless.tolerances import GRADIENT, ON_TOP_LOSS, error  # noqa: E402
from logitless.torch_impl.integrations import cce as ours  # noqa: E402

NO_CCE = "its own functions are compared here, and cut-cross-entropy is not installed"
B, T, D, V = 3, 6, 16, 37
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "shift": {"shift": 1},
    "shift 2, none": {"shift": 2, "reduction": "none"},
    "True, softcap": {"shift": True, "softcap": 3.0},
    "ignored id": {"ignore_index": 5, "reduction": "none"},
    "tuned": {"filter_eps": None, "accum_e_fp32": True, "accum_c_fp32": True, "filter_e_grad": False},
    "all": {"shift": 1, "softcap": 4.0, "reduction": "none", "ignore_index": 5, "impl": "cce_exact"},
}


def inputs(dtype: Any = torch.float64, shape: tuple[int, ...] = (B, T)) -> tuple[Any, ...]:
    """e (a slice of columns), c (a transpose), targets with ignored tokens, bias."""
    generator = torch.Generator().manual_seed(0)
    e = torch.randn(*shape, 2 * D, generator=generator, dtype=torch.float64)[..., ::2].to(dtype)
    c = (torch.randn(D, V, generator=generator, dtype=torch.float64).T * D**-0.5).to(dtype)
    bias = torch.randn(V, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, V, shape, generator=generator)
    targets[..., 1] = -100
    targets[..., 3] = 5
    return e.requires_grad_(), c.requires_grad_(), targets, bias.requires_grad_()


def valid(targets: Any, options: dict[str, Any]) -> Any:
    """Targets in which nothing but ``ignore_index`` is outside of the vocabulary."""
    return targets.masked_fill(targets == -100, options.get("ignore_index", -100))


def full_logits(e: Any, c: Any, targets: Any, bias: Any, **options: Any) -> tuple[Any, Any]:
    """The loss and lse from full logits."""
    shift, cap = int(options.get("shift", 0)), options.get("softcap")
    z = e @ c.T if bias is None else e @ c.T + bias
    z = z if cap is None else cap * torch.tanh(z / cap)
    z, targets = z[..., : z.shape[-2] - shift, :], targets[..., shift:]
    ignored = options.get("ignore_index", -100)
    loss = torch.nn.functional.cross_entropy(
        z.flatten(0, -2), targets.flatten(), ignore_index=ignored, reduction=options.get("reduction", "mean")
    )
    lse = torch.where(targets == ignored, 0.0, z.logsumexp(-1))
    return loss.reshape(targets.shape) if loss.dim() else loss, lse


def outcome(loss: Any, lse: Any, leaves: Any) -> list[Any]:
    """Results, and gradients of a sum in which no two elements have one weight."""
    total = sum(
        (values.double() * torch.linspace(0.5, 1.5, values.numel()).reshape(values.shape)).sum()
        for values in (loss, lse if lse is None else lse**2)
        if values is not None
    )
    return [loss, lse, *torch.autograd.grad(total, leaves)]


def compare(made: list[Any], right: list[Any], dtype: str) -> None:
    for number, (a, b) in enumerate(zip(made, right, strict=True)):
        assert (a is None) == (b is None)
        if a is not None:
            tolerance = ON_TOP_LOSS if number < 2 else GRADIENT
            assert error(a.detach(), b.detach()) <= tolerance[dtype], number


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_against_full_logits(name: str, has_bias: bool, return_lse: bool) -> None:
    e, c, targets, bias = inputs()
    options, b = OPTIONS[name], bias if has_bias else None
    targets = valid(targets, options)
    made = ours.linear_cross_entropy(e, c, targets, b, return_lse=return_lse, **options)
    loss, lse = made if return_lse else (made, None)
    right, right_lse = full_logits(e, c, targets, b, **options)
    leaves = [e, c, bias] if has_bias else [e, c]
    compare(outcome(loss, lse, leaves), outcome(right, right_lse if return_lse else None, leaves), "float64")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_sequence_without_an_axis(reduction: Any) -> None:
    e, c, targets, _ = inputs(shape=(T,))
    made = ours.linear_cross_entropy(e, c, targets, shift=1, reduction=reduction, return_lse=True)
    right = full_logits(e, c, targets, None, shift=1, reduction=reduction)
    assert made[1].shape == (T - 1,)
    compare(outcome(*made, [e, c]), outcome(*right, [e, c]), "float64")


def test_the_module_is_the_function() -> None:
    e, c, targets, bias = inputs(torch.float32)
    head = ours.LinearCrossEntropy(softcap=3.0, shift=True, reduction="none", return_lse=True, impl="cce_kahan_full_c")
    right = ours.linear_cross_entropy(e, c, targets, bias, softcap=3.0, shift=1, reduction="none", return_lse=True)
    for a, b in zip(head(e, c, targets, bias), right, strict=True):
        assert torch.equal(a, b)
    assert (head.shift, head.softcap, head.impl) == (True, 3.0, "cce_kahan_full_c")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shift", [False, True])
def test_z_loss(reduction: Any, shift: bool) -> None:
    e, c, targets, _ = inputs()
    _, lse = ours.linear_cross_entropy(e, c, targets, shift=shift, return_lse=True)
    made = ours.compute_z_loss(lse, targets, shift, reduction=reduction)
    scored = targets[..., int(shift) :] != -100
    right = torch.where(scored, full_logits(e, c, targets, None, shift=shift)[1] ** 2, 0.0)
    right = {"mean": right.sum() / scored.sum(), "sum": right.sum(), "none": right}[reduction]
    assert error(made.detach(), right.detach()) <= ON_TOP_LOSS["float64"]
    assert error(ours.compute_z_loss(lse).detach(), (lse**2).mean().detach()) <= ON_TOP_LOSS["float64"]


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"impl": "fast"}, ValueError, r"^impl: got 'fast', allowed are 'cce', 'torch_compile'"),
        ({"filter_eps": "low"}, ValueError, r"^filter_eps: got 'low', allowed are 'auto', 'high'"),
        ({"filter_eps": -1.0}, ValueError, r"^filter_eps: got -1.0, allowed"),
        ({"filter_e_grad": None}, TypeError, r"^filter_e_grad: got NoneType None, allowed are True and False"),
        ({"accum_c_fp32": 1}, TypeError, r"^accum_c_fp32: got int 1, allowed are True and False"),
        ({"shift": T}, ValueError, rf"^shift: got {T} .*allowed is 0 or less than its last axis"),
        ({"shift": -1}, ValueError, r"^shift: got -1 .*allowed is 0 or less"),
        ({"reduction": "average"}, ValueError, r"^reduction: got 'average'"),
    ],
)
def test_what_is_refused(given: dict[str, Any], kind: type[Exception], words: str) -> None:
    e, c, targets, _ = inputs(torch.float32)
    with pytest.raises(kind, match=words):
        ours.linear_cross_entropy(e, c, targets, **given)


# ---------------------------------------------------------------------------------------------------------------------
# Its own functions


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    """The package. It compiles plain operations, which are right without being compiled."""
    package = pytest.importorskip("cut_cross_entropy", reason=NO_CCE)
    torch.compiler.set_stance("force_eager")
    yield package
    torch.compiler.set_stance("default")


def taken(function: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options, for an older version without those that it does not have."""
    known = inspect.signature(function).parameters
    missing = set(options) - set(known)
    if missing:
        pytest.skip(f"this version of cut-cross-entropy has no {', '.join(sorted(missing))}")
    return options


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("tuned", "all")])
def test_against_the_package(theirs: Any, name: str, has_bias: bool, return_lse: bool) -> None:
    e, c, targets, bias = inputs(torch.float32)
    targets = valid(targets, OPTIONS[name])
    more = ({"bias": bias} if has_bias else {}) | ({"return_lse": True} if return_lse else {})
    options = taken(theirs.linear_cross_entropy, OPTIONS[name] | more)
    if "shift 2" in name and "bool |" not in str(inspect.signature(theirs.linear_cross_entropy)):
        pytest.skip("this version of cut-cross-entropy shifts by one at most")
    leaves = [e, c, bias] if has_bias else [e, c]
    pairs = []
    for function, impl in ((ours.linear_cross_entropy, "cce"), (theirs.linear_cross_entropy, "torch_compile")):
        made = function(e, c, targets, impl=impl, **options)
        loss, lse = made if return_lse else (made, None)
        assert loss.dtype == torch.float32
        pairs.append(outcome(loss, lse, leaves))
    compare(*pairs, "float32")


def test_its_options_are_taken(theirs: Any) -> None:
    """Its enumeration, and its options for a shared vocabulary, which are read by name."""
    e, c, targets, _ = inputs(torch.float32)
    values = []
    for impl in importlib.import_module(theirs.linear_cross_entropy.__module__).LinearCrossEntropyImpl:
        values.append(ours.linear_cross_entropy(e, c, targets, impl=impl))
    assert all(torch.equal(value, values[0]) for value in values)


def test_signatures_are_those_of_the_package(theirs: Any) -> None:
    def listed(function: Any) -> list[tuple[str, Any]]:
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, getattr(p.default, "name", p.default)) for p in parameters]

    if "vocab_parallel_options" not in inspect.signature(theirs.linear_cross_entropy).parameters:
        pytest.skip("this version of cut-cross-entropy has fewer arguments")
    for name in ("linear_cross_entropy", "LinearCrossEntropy", "VocabParallelOptions"):
        assert listed(getattr(ours, name)) == listed(getattr(theirs, name)), name
    assert listed(ours.LinearCrossEntropy.forward) == listed(theirs.LinearCrossEntropy.forward)
    assert listed(ours.VocabParallelOptions.from_vocab) == listed(theirs.VocabParallelOptions.from_vocab)
    utils = importlib.import_module("cut_cross_entropy.utils")
    assert listed(ours.compute_z_loss) == listed(utils.compute_z_loss)
    names = [impl.name for impl in ours.LinearCrossEntropyImpl]
    assert names == [impl.name for impl in theirs.LinearCrossEntropyImpl]


# ---------------------------------------------------------------------------------------------------------------------
# A shared vocabulary


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def parallel_run(rank: int, changes: dict[int, dict[str, Any]]) -> Any:
    e, c, targets, bias = inputs()
    options = ours.VocabParallelOptions.from_vocab(V)
    own = slice(options.start, options.stop)
    for name, value in changes.get(rank, {}).items():
        setattr(options, name, value)
    leaves = [e, c[own].detach().requires_grad_(), bias[own].detach().requires_grad_()]
    loss, lse = ours.linear_cross_entropy(
        leaves[0], leaves[1], targets, leaves[2], shift=1, softcap=3.0, return_lse=True, vocab_parallel_options=options
    )
    return [value.detach().numpy() for value in outcome(loss, lse, leaves)]


@pytest.mark.case(26)
def test_a_shared_vocabulary(pool: Ranks) -> None:
    answers = pool.run(parallel_run, {})
    e, c, targets, bias = inputs()
    right = outcome(*full_logits(e, c, targets, bias, shift=1, softcap=3.0), [e, c, bias])
    for answer in answers:
        compare([torch.as_tensor(a) for a in answer[:3]], right[:3], "float64")
    for number in (3, 4):
        parts = [torch.as_tensor(answer[number]) for answer in answers]
        assert error(torch.cat(parts), right[number]) <= GRADIENT["float64"]


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({1: {"start": 0, "stop": 18}}, "ValueError", "vocab_parallel_options: got start=0 beside 19 entries"),
        ({1: {"stop": 30}}, "ValueError", "c: got 18 rows beside vocab_parallel_options for entries 19 to 30"),
        ({0: {"reduce_e_grad": False}}, "NotImplementedError", "got reduce_e_grad=False, allowed is True"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(pool: Ranks, changes: Any, kind: str, words: str) -> None:
    made = pool.outcomes(parallel_run, changes)
    assert all(isinstance(answer, Failed) for answer in made)
    (wrong,) = changes
    assert made[wrong].kind == kind
    assert words in made[wrong].words
    assert "refused its arguments" in made[1 - wrong].words


# ---------------------------------------------------------------------------------------------------------------------
# Models


def test_cce_patch() -> None:
    transformers = pytest.importorskip("transformers", reason="the test is of its models")
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    plain = model(ids, labels=ids).loss
    assert ours.cce_patch(model, impl="torch_compile", train_only=True) is model
    assert error(model(ids, labels=ids).loss.detach(), plain.detach()) <= ON_TOP_LOSS["float32"]
    with pytest.raises(NotImplementedError, match=r"^model_type_or_model: got 'llama', allowed is a model.*cce_patch"):
        ours.cce_patch("llama")
    with pytest.raises(NotImplementedError, match=r"^reduction: got 'none', allowed is 'mean'"):
        ours.cce_patch(model, reduction="none")


def test_nothing_is_imported_before_it_is_used() -> None:
    import subprocess
    import sys

    program = "import sys, logitless.torch_impl; print([n for n in sys.modules if 'integrations' in n])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert (Path(ours.__file__).parent / "__init__.py").read_text().count("\n") == 1
