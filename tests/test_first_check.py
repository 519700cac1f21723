"""On a chip that nobody here has run, a call's kernels are first held against plain operations (interpreted here)."""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about torch_impl")
pytest.importorskip("triton", reason="these tests are about Triton's kernels")

from logitless import plan  # noqa: E402
from logitless.tolerances import FIRST_CALL, error  # noqa: E402
from logitless.torch_impl import checks, linear_cross_entropy, linear_log_probs  # noqa: E402
from logitless.torch_impl.backend import chosen_backend  # noqa: E402
from logitless.torch_impl.call import is_turned  # noqa: E402
from logitless.torch_impl.kernels import architecture, first_check, launch, products, trial  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are not interpreted here")

TOKENS, HIDDEN, VOCAB = 40, 16, 100
IN_CHUNKS = plan(tokens=TOKENS, hidden=HIDDEN, vocab=VOCAB, dtype="float32", order="tokens", chunk=16, fused=True)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is on, and has passed and refused nothing."""
    monkeypatch.setenv("LOGITLESS_CHECK", "1")
    monkeypatch.setattr(first_check, "_passed", set())
    monkeypatch.setattr(architecture, "refused", {})


@pytest.fixture
def kernels_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a backend's name a call takes the kernels where they are available, as it does on a GPU."""

    def chosen(name: str | None, *asked: Any) -> Any:
        try:
            return chosen_backend(name or "triton", *asked)
        except NotImplementedError:
            if name is not None:
                raise
            return "eager"

    monkeypatch.setattr(checks, "chosen_backend", chosen)


def arrays() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, HIDDEN), torch.randn(VOCAB, HIDDEN)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(VOCAB, (TOKENS,))


def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What each comparison that is made from now on finds."""
    found: list[str | None] = []
    compare = first_check.compare

    def noted(*arguments: Any) -> str | None:
        found.append(compare(*arguments))
        return found[-1]

    monkeypatch.setattr(first_check, "compare", noted)
    return found


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_without_gradients_and_without_tokens(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = comparisons(monkeypatch)
    hidden, weight, target = arrays()
    with mode():
        linear_cross_entropy(hidden, weight, target, backend="triton")
        linear_cross_entropy(hidden[:0], weight, target[:0], backend="triton")
    assert found == [None]


def test_tokens_along_several_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = comparisons(monkeypatch)
    hidden, weight, target = arrays()
    rows = hidden.reshape(2, TOKENS // 2, HIDDEN), weight, target.reshape(2, -1)
    linear_cross_entropy(*rows, token_weight=torch.rand(2, TOKENS // 2), backend="triton").backward()
    assert found == [None]


@pytest.mark.parametrize("checks_again", [False, True])
def test_in_a_step_that_computes_again(checks_again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.utils.checkpoint counts the tensors that are saved, and stops at the last one. The forward checks. What is
    computed again does not, or does if the forward's check is not known to it."""
    found = comparisons(monkeypatch)
    hidden, weight, target = arrays()

    def loss(hidden: Any, weight: Any) -> Any:
        return linear_cross_entropy(torch.tanh(hidden), weight, target, backend="triton")

    loss(hidden, weight).backward()
    expected = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    first_check._passed.clear()
    made = torch.utils.checkpoint.checkpoint(loss, hidden, weight, use_reentrant=False)
    if checks_again:
        first_check._passed.clear()
    made.backward()
    assert found == [None] * (3 if checks_again else 2)
    assert torch.equal(hidden.grad, expected[0])
    assert torch.equal(weight.grad, expected[1])


def test_a_weight_that_lies_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    found, layouts = comparisons(monkeypatch), []
    real = first_check.autograd.values

    def values(small: Any, *rest: Any) -> Any:
        layouts.append(is_turned(small.weight))
        return real(small, *rest)

    monkeypatch.setattr(first_check.autograd, "values", values)
    hidden, weight, target = arrays()
    turned = weight.detach().T.contiguous().requires_grad_()
    linear_cross_entropy(hidden, turned, target, weight_layout="dv", backend="triton").backward()
    assert found == [None]
    assert len(layouts) > 1
    assert all(layouts)


def test_each_kind_of_call_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = comparisons(monkeypatch)
    hidden, weight, target = arrays()
    calls: list[dict[str, Any]] = [{}, {"softcap": 5.0}, {"plan": IN_CHUNKS}, {"accumulate_into": weight.detach() * 0}]
    calls += [{"temperature": torch.rand(TOKENS) + 0.5}]
    calls += [{"token_weight": torch.rand(TOKENS), "class_weight": torch.rand(VOCAB), "bias": torch.zeros(VOCAB)}]
    for options in calls:
        for _ in range(2):
            linear_cross_entropy(hidden, weight, target, backend="triton", **options).backward()
    for _ in range(2):
        sum(each.sum() for each in linear_log_probs(hidden, weight, target, with_entropy=True, backend="triton"))
    assert found == [None] * (len(calls) + 1)


@pytest.mark.parametrize("setting", ["0", None])
def test_nothing_is_compared_where_nothing_is_new(setting: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable only what was never run is compared; the interpreter was."""
    found = comparisons(monkeypatch)
    monkeypatch.setenv("LOGITLESS_CHECK", setting) if setting else monkeypatch.delenv("LOGITLESS_CHECK")
    linear_cross_entropy(*arrays(), backend="triton")
    assert not found


@pytest.mark.parametrize(("chip", "new"), [("9.0", False), ("8.0", True), ("12.0", True), ("gfx942", True)])
def test_what_is_new(chip: str, new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "chip_of", lambda index: chip)
    assert trial.is_new(0) is new


def test_nothing_is_compared_while_a_graph_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    found = comparisons(monkeypatch)
    hidden, *rest = arrays()
    torch.func.grad(lambda x: linear_cross_entropy(x, *rest, backend="triton"))(hidden)
    assert not found


def wrong_weight(self: products.GradientProducts, *arguments: Any) -> None:
    """dW's product, off by a few percent."""
    right_weight(self, *arguments)
    if self.weight is not None:
        self.weight.mul_(1 + 4 * FIRST_CALL["float32"])


right_weight = products.GradientProducts.add_weight


def out_of_resources(*_: Any) -> Any:
    from triton.runtime.errors import OutOfResources

    raise OutOfResources(200_000, 101_376, "shared memory")


@pytest.mark.usefixtures("kernels_by_default")
@pytest.mark.parametrize(
    ("of", "name", "broken", "says"),
    [
        (products.GradientProducts, "add_weight", wrong_weight, "a result is off by"),
        (launch, "launch", out_of_resources, "OutOfResources"),
    ],
    ids=["wrong", "fails"],
)
def test_what_does_not_pass_is_not_used(
    of: Any, name: str, broken: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning says why, plain operations are used, and who asks for the kernels is refused."""
    hidden, weight, target = arrays()
    expected = torch.autograd.grad(linear_cross_entropy(hidden, weight, target, backend="eager"), [hidden, weight])
    monkeypatch.setattr(of, name, broken)
    with pytest.warns(RuntimeWarning, match=f"{says}.*backend='eager'.*doctor"):
        loss = linear_cross_entropy(hidden, weight, target)
    for found, right in zip(torch.autograd.grad(loss, [hidden, weight]), expected, strict=True):
        assert error(found.numpy(), right.numpy()) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linear_cross_entropy(hidden, weight, target, softcap=5.0)
    with pytest.raises(NotImplementedError, match=f"{says}.*backend='eager' can"):
        linear_cross_entropy(hidden, weight, target, backend="triton")


def test_who_asks_for_kernels_that_do_not_pass_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products.GradientProducts, "add_weight", wrong_weight)
    with (
        pytest.warns(RuntimeWarning, match="a result is off by"),
        pytest.raises(NotImplementedError, match=r"a result is off by.*backend='eager' can"),
    ):
        linear_cross_entropy(*arrays(), backend="triton")


@pytest.mark.usefixtures("kernels_by_default")
def test_a_temperature_per_token_that_does_not_pass_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a chip where the kernels were run, the other calls keep them."""
    tau = torch.rand(TOKENS) + 0.5
    with monkeypatch.context() as patch:
        patch.setattr(products.GradientProducts, "add_weight", wrong_weight)
        with pytest.warns(RuntimeWarning, match="beside a temperature per token: they failed"):
            linear_cross_entropy(*arrays(), temperature=tau)
    ran = []
    real = first_check.autograd.values
    monkeypatch.setattr(first_check.autograd, "values", lambda a, n, call: ran.append(call.backend) or real(a, n, call))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linear_cross_entropy(*arrays())
        assert set(ran) == {"eager", "triton"}  # the comparison
        ran.clear()
        linear_cross_entropy(*arrays(), temperature=tau)
    assert ran == ["eager"]
    with pytest.raises(NotImplementedError, match=r"off by.*backend='eager' can"):
        linear_cross_entropy(*arrays(), temperature=tau, backend="triton")


@pytest.mark.parametrize(("kind", "each", "new"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)])
def test_a_temperature_per_token_is_new_on_every_gpu(
    kind: str, each: bool, new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOGITLESS_CHECK")
    monkeypatch.setattr(architecture, "chip_of", lambda index: "9.0")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert first_check.wanted(torch.device(kind, 0), each) is new


def test_sums_of_other_bits_and_an_early_dx_are_other_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has kernels of its own. A small call has few chunks, and keeps the bits of one with many."""
    sizes: dict[str, Any] = {"hidden": HIDDEN, "vocab": VOCAB, "dtype": "bfloat16", "fused": True, "lends": True}
    few = plan(tokens=TOKENS, order="tokens", chunk=16, **sizes)
    many = plan(tokens=TOKENS, order="tokens", chunk=1, **sizes)
    one = dataclasses.replace(few, token_chunk=TOKENS, sum_bits=24)
    plans = [few, many, one, dataclasses.replace(one, early_hidden=True)]
    assert [chosen.low_bits for chosen in plans] == [4, 8, 8, 8]
    checked: list[tuple[int, bool]] = []
    compare = first_check.compare

    def compared(arrays: Any, call: Any) -> str | None:
        small = first_check._small(arrays, call)[1]
        checked.append((small.low_bits, small.early_hidden))
        return compare(arrays, call)

    monkeypatch.setattr(first_check, "compare", compared)
    hidden, weight, target = arrays()
    halves = [array.detach().bfloat16().requires_grad_() for array in (hidden, weight)]
    for chosen in (*plans, *plans):
        linear_cross_entropy(*halves, target, plan=chosen, backend="triton")
    assert checked == [(4, False), (8, False), (8, False), (8, True)]
