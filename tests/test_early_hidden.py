"""In a small step the forward makes dX, which then waits for the upstream scalar. Kernels are interpreted."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import pytest
from implementations import ARGUMENTS, TorchTriton, assert_within, interpreted, problem_named, run_case

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from logitless import reference  # noqa: E402
from logitless.planning import Request, choose  # noqa: E402
from logitless.tolerances import GRADIENT, error  # noqa: E402
from logitless.torch_impl import linear_cross_entropy  # noqa: E402
from logitless.torch_impl.kernels.products import GradientProducts  # noqa: E402

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")


def late(tokens: int, hidden: int, vocab: int, dtype: str = "bfloat16", **more: Any) -> Request:
    """What is asked for a plan of one chunk."""
    return Request(tokens, hidden, vocab, dtype, kind="triton", order="tokens", chunk=tokens, **more)


class Early:
    """Counts the products that a forward makes of dX, in ``made``, and its other products, in ``later``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = self.later = 0
        make, add = GradientProducts.make_hidden, GradientProducts.add_hidden

        def made(products: GradientProducts, *arguments: Any) -> None:
            make(products, *arguments)
            self.made += products.is_hidden_made
            self.later -= products.is_hidden_made

        def added(products: GradientProducts, *arguments: Any) -> None:
            self.later += 1
            add(products, *arguments)

        monkeypatch.setattr(GradientProducts, "make_hidden", made)
        monkeypatch.setattr(GradientProducts, "add_hidden", added)


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Early:
    return Early(monkeypatch)


def arrays(seed: int = 0, **more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x, w, b = (torch.tensor(rng.standard_normal(shape)).float() for shape in ((24, 16), (60, 16), 60))
    y = torch.tensor(rng.integers(0, 60, 24))
    y[::5] = -100
    leaves = {"hidden": x.requires_grad_(), "weight": w.requires_grad_(), "bias": b.requires_grad_()}
    return leaves | {"target": y, "backend": "triton"} | more


def true(a: dict[str, Any], upstream: float = 1.0) -> dict[str, Any]:
    """The gradients in float64."""
    x, w, b, y = (a[name].detach().numpy() for name in (*ARGUMENTS, "target"))
    smoothing = a.get("label_smoothing", 0.0)
    made = reference.linear_cross_entropy(x, w, y, b, upstream=upstream, label_smoothing=smoothing)
    return {name: getattr(made, f"{name}_grad") for name in ARGUMENTS}


def assert_right(made: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, gradient in made.items():
        assert error(gradient.numpy(), expected[name]) <= GRADIENT["float32"], name


@interpreted
@pytest.mark.parametrize(
    "name",
    [
        *("odd_bias", "odd_most", "odd_softcap", "signed_smooth", "ragged", "confident", "confident_wrong"),
        *("minus_inf", "trained_bias", "trained_weights", "trained_smooth"),
    ],
)
def test_within_the_rule(name: str, early: Early) -> None:
    problem = problem_named(name)
    assert_within(problem, run_case(TorchTriton(), problem.case()))
    assert (early.made, early.later) == (1, 0)


@interpreted
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("upstream", [1.0, -3e-3, 700.0])
def test_any_upstream_scalar(upstream: float, smoothing: float, early: Early) -> None:
    a = arrays(label_smoothing=smoothing)
    linear_cross_entropy(**a).backward(torch.tensor(upstream))
    assert (early.made, early.later) == (1, 0)
    assert_right({name: a[name].grad for name in ARGUMENTS}, true(a, upstream))
    assert not a["hidden"].grad[::5].any()


@interpreted
def test_a_second_backward_makes_it_again(early: Early) -> None:
    """What waited is used up."""
    a = arrays()
    loss, leaves = linear_cross_entropy(**a), [a[name] for name in ARGUMENTS]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert (early.made, early.later) == (1, 0)
    second = torch.autograd.grad(loss, leaves, torch.tensor(2.0))
    assert (early.made, early.later) == (1, 1)
    assert_right(dict(zip(ARGUMENTS, first, strict=True)), true(a))
    assert_right(dict(zip(ARGUMENTS, second, strict=True)), true(a, 2.0))


@interpreted
@pytest.mark.parametrize("frozen", ARGUMENTS)
def test_some_arguments_are_frozen(frozen: str, early: Early) -> None:
    a = arrays()
    a[frozen] = a[frozen].detach()
    linear_cross_entropy(**a).backward()
    assert (early.made, early.later) == (int(frozen != "hidden"), 0)
    assert_right({name: a[name].grad for name in ARGUMENTS if name != frozen}, true(a))


@interpreted
@pytest.mark.parametrize("where", ["a weight [D, V]", "a buffer"])
def test_where_the_weight_lies_and_where_its_gradient_goes(where: str, early: Early) -> None:
    a = arrays()
    if where == "a buffer":
        a["accumulate_into"] = torch.ones(60, 16)
    else:
        a["weight"] = a["weight"].detach().T.contiguous().T.requires_grad_()
    linear_cross_entropy(**a).backward()
    assert early.later == (where == "a buffer")  # whose plan is another one
    made = {"hidden": a["hidden"].grad, "bias": a["bias"].grad}
    assert_right(made | {"weight": a["accumulate_into"] - 1 if where == "a buffer" else a["weight"].grad}, true(a))


@interpreted
def test_compiled_calls_leave_it_to_the_backward(early: Early) -> None:
    a = arrays()
    torch.compile(lambda: linear_cross_entropy(**a), backend="aot_eager")().backward()
    assert (early.made, early.later) == (0, 1)
    assert_right({name: a[name].grad for name in ARGUMENTS}, true(a))


def test_the_plan_says_so_and_counts_it() -> None:
    sizes = 512, 2048, 32000
    made, other = choose(late(*sizes, early=True)), choose(late(*sizes))
    assert (made.early_hidden, other.early_hidden) == (True, False)
    assert made.scratch_bytes == other.scratch_bytes + 512 * 2048
    assert choose(late(*sizes, "float32", early=True)).scratch_bytes == choose(late(*sizes, "float32")).scratch_bytes


@pytest.mark.parametrize(
    "other", [{"tokens": 4096}, {"kind": "pallas"}, {"kind": "eager"}, {"dtype": "float16"}, {"chunk": 256}]
)
def test_where_the_gpu_is_not_idle(other: dict[str, Any]) -> None:
    asked = late(512, 2048, 32000, early=True)
    assert not choose(dataclasses.replace(asked, **other)).early_hidden


@interpreted
def test_bfloat16_waits_with_24_bits(early: Early) -> None:
    """With 16 it would be rounded twice. So nearly all elements have the bits that a later product gives them."""
    a, b, kept, finish = arrays(), arrays(), [], GradientProducts.finish
    for each in (a, b):
        each |= {name: each[name].detach().bfloat16().requires_grad_() for name in ARGUMENTS}

    def finished(products: GradientProducts, *arguments: Any) -> Any:
        kept.append(products.waiting_low)
        return finish(products, *arguments)

    with mock.patch.object(GradientProducts, "finish", finished):
        linear_cross_entropy(**a).backward(torch.tensor(0.7))
        linear_cross_entropy(**b, plan=choose(late(24, 16, 60))).backward(torch.tensor(0.7))
    assert (early.made, early.later) == (1, 1)
    assert kept[0].any()
    assert kept[1] is None
    assert (a["hidden"].grad == b["hidden"].grad).float().mean() > 0.98
    assert torch.equal(a["weight"].grad, b["weight"].grad)


@interpreted
@pytest.mark.parametrize("layout", ["offset", "stepped", "transposed", "expanded"])
def test_layouts(layout: str, early: Early) -> None:
    a, memory = arrays(), torch.zeros(25, 40)
    x = a["hidden"].detach()
    views = {"offset": memory[1:, 3:19], "stepped": memory[:24, 1:33:2], "transposed": torch.zeros(16, 24).T}
    laid = x[:1].expand(24, 16) if layout == "expanded" else views[layout].copy_(x)
    a["hidden"] = laid.requires_grad_()
    expected = true(a | {"hidden": laid.contiguous()})
    made = torch.autograd.grad(linear_cross_entropy(**a), [a[name] for name in ARGUMENTS])
    assert (early.made, early.later) == (1, 0)
    assert_right(dict(zip(ARGUMENTS, made, strict=True)), expected)


@interpreted
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_no_number_leaves_the_others(value: float, early: Early) -> None:
    """Of a sum, whose scale is 1: dX of the other tokens has the bits that it has without that row."""
    made = []
    for spoilt in (False, True):
        a = arrays(reduction="sum")
        if spoilt:
            a["hidden"] = a["hidden"].detach().index_fill_(0, torch.tensor([3]), value).requires_grad_()
        linear_cross_entropy(**a).backward()
        made.append(a["hidden"].grad)
    assert early.made == 2
    assert not made[1][3].isfinite().any()
    others = torch.arange(24) != 3
    assert torch.equal(made[0][others], made[1][others])


@interpreted
def test_other_roads_to_a_derivative(early: Early) -> None:
    """Checkpointing makes it in the second forward; torch.func leaves it to the backward."""
    from torch.utils.checkpoint import checkpoint

    a = arrays()
    checkpoint(lambda x: linear_cross_entropy(**(a | {"hidden": x})), a["hidden"], use_reentrant=False).backward()
    assert early.later == 0
    assert_right({name: a[name].grad for name in ARGUMENTS}, true(a))
    made = torch.func.grad(lambda x: linear_cross_entropy(**(a | {"hidden": x})))(a["hidden"].detach())
    assert early.later == 1
    assert_right({"hidden": made}, true(a))
    twice = torch.autograd.grad(linear_cross_entropy(**a), a["hidden"], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="linear_cross_entropy"):
        twice.sum().backward()
