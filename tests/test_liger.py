"""Liger-Kernel's names (torch_impl.integrations.liger), against full logits in float64 and against Liger's kernels.

Liger's kernels are compared where liger-kernel is installed: interpreted, without a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from logitless.tolerances import CANCELLED, GRADIENT, ON_TOP_GRADIENT, ON_TOP_LOSS, error  # noqa: E402
from logitless.torch_impl import eager  # noqa: E402
from logitless.torch_impl.integrations import liger as ours  # noqa: E402

NO_LIGER = "Liger's own functions are compared here, and liger-kernel is not installed"
N, D, V, IGNORED = 12, 16, 37, 5
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignored": {"ignore_index": IGNORED},
    "smooth": {"label_smoothing": 0.1},
    "z-loss": {"lse_square_scale": 1e-2},
    "softcap": {"softcap": 3.0},
    "class weights": {"ce_weight": True},
    "class weights, smooth, none": {"ce_weight": True, "label_smoothing": 0.2, "reduction": "none"},
    "all": {"ce_weight": True, "label_smoothing": 0.2, "softcap": 4.0, "lse_square_scale": 1e-2, "reduction": "sum"},
    "scaled": {"use_token_scaling": True, "ignore_index": IGNORED},
    "scaled, all": {"use_token_scaling": True, "ce_weight": True, "softcap": 4.0, "label_smoothing": 0.1},
    "scaled, z-loss": {"use_token_scaling": True, "lse_square_scale": 1e-2, "reduction": "none"},
}
RETURNED = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}


def inputs(dtype: Any = torch.float64) -> tuple[Any, ...]:
    """input (a slice of columns), weight (a transpose), target, bias, class weights: two tokens are right, two ignored
    by the id 5, one by -100 where nothing else is said."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 2 * D, generator=generator, dtype=torch.float64)[:, ::2].to(dtype)
    weight = torch.randn(D, V, generator=generator, dtype=torch.float64).T.to(dtype)
    bias = torch.randn(V, generator=generator, dtype=torch.float64).to(dtype)
    target = torch.randint(0, V, (N,), generator=generator)
    target[3:5] = (x.double() @ weight.double().T + bias.double()).argmax(-1)[3:5]
    target[1] = target[8] = IGNORED
    k = torch.rand(V, generator=generator, dtype=torch.float64) + 0.5
    return x.requires_grad_(), weight.requires_grad_(), target, bias.requires_grad_(), k


def marked(options: dict[str, Any], target: Any, k: Any) -> tuple[dict[str, Any], Any]:
    """Options with their class weights, and the target with an ignored token whatever ignore_index is."""
    target = target.clone()
    target[6] = options.get("ignore_index", -100)
    return options | ({"ce_weight": k} if "ce_weight" in options else {}), target


def truth(x: Any, w: Any, y: Any, b: Any, k: Any, **options: Any) -> dict[str, Any]:
    """Loss and what comes beside it, from full logits in float64, by the formula in logitless.spec."""
    x, w, b = x.double(), w.double(), b.double()
    eps, lam, cap = (options.get(key) for key in ("label_smoothing", "lse_square_scale", "softcap"))
    z = x @ w.T + b
    z = z if cap is None else cap * torch.tanh(z / cap)
    log_p, lse = z.log_softmax(-1), z.logsumexp(-1)
    counts = y != options.get("ignore_index", -100)
    y, eps, lam = torch.where(counts, y, 0), eps or 0.0, lam or 0.0
    k = torch.ones(V, dtype=torch.float64) if "ce_weight" not in options else k.double()
    target_log_p = log_p.gather(-1, y[:, None])[:, 0]
    t = counts.double() * (target_log_p.detach().exp() if options.get("use_token_scaling") else 1.0)
    loss = t * (-(1 - eps) * k[y] * target_log_p - eps / V * (log_p * k).sum(-1) + lam * lse.square())
    z_loss, correct = t * lam * lse.square(), (z.argmax(-1) == y) & counts
    reduction = options.get("reduction", "mean")
    if reduction != "none":
        number = (k[y] * counts).sum() if reduction == "mean" else 1
        loss, z_loss, correct = loss.sum() / number, z_loss.sum() / number, correct.sum() / counts.sum()
    predicted = torch.where(counts, z.argmax(-1), -1)
    return {"loss": loss, "z_loss": z_loss, "token_accuracy": correct.double(), "predicted_tokens": predicted}


def gradients(loss: Any, leaves: list[Any]) -> tuple[Any, ...]:
    upstream = torch.linspace(-1, 2, N) if loss.dim() else torch.tensor(1.5)
    return torch.autograd.grad(loss, leaves, upstream.to(loss))


@pytest.mark.parametrize("how", ["function", "module"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_fused_loss_is_that_of_full_logits(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, y, b, k = inputs()
    options, y = marked(OPTIONS[name], y, k)
    known = truth(x, w, y, b, k, **OPTIONS[name])

    def alone() -> Any:
        if how == "function":
            return ours.liger_fused_linear_cross_entropy(x, w, y, bias=b, **options)
        return ours.LigerFusedLinearCrossEntropyLoss(**options)(w, x, y, b)

    if how == "function":
        found = ours.liger_fused_linear_cross_entropy(x, w, y, b, **options, **RETURNED)
    else:
        found = ours.LigerFusedLinearCrossEntropyLoss(**options, **RETURNED)(w, x, y, b)
    small = alone()
    assert error(small.detach(), known["loss"].detach()) <= GRADIENT["float64"]
    assert_gradients(small, truth(x, w, y, b, k, **OPTIONS[name]), [x, w, b])
    monkeypatch.setattr(eager, "plain_loss", lambda *_: None)  # which has other roundings
    assert_same(found, known, alone(), [x, w, b])


@pytest.mark.parametrize("name", [name for name in OPTIONS if "scaled" not in name])
def test_the_loss_on_logits_is_that_of_full_logits(name: str) -> None:
    x, w, y, b, k = inputs()
    options, y = marked(OPTIONS[name], y, k)
    known = truth(x, w, y, b, k, **OPTIONS[name])
    if "ce_weight" in options:
        options["weight"] = options.pop("ce_weight")
    logits = x @ w.T + b
    found, alone = (ours.LigerCrossEntropyLoss(**options, **more)(logits, y) for more in (RETURNED, {}))
    assert_same(found, known, alone, [x, w, b])


def assert_same(found: Any, known: dict[str, Any], alone: Any, leaves: list[Any]) -> None:
    for key, value in known.items():
        assert error(getattr(found, key).detach(), value.detach()) <= GRADIENT["float64"], key
        assert getattr(found, key).requires_grad == (key == "loss")
    assert 0 < known["token_accuracy"].mean() < 1
    assert torch.equal(found.loss, alone)
    assert_gradients(alone, known, leaves)


def assert_gradients(loss: Any, known: dict[str, Any], leaves: list[Any]) -> None:
    for mine, theirs in zip(gradients(loss, leaves), gradients(known["loss"], leaves), strict=True):
        assert error(mine, theirs) <= GRADIENT["float64"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_on_logits_has_their_dtype(dtype: Any) -> None:
    logits, target = torch.randn(N, V, generator=torch.Generator().manual_seed(1)).to(dtype), inputs()[2]
    logits.requires_grad_()
    alone = ours.LigerCrossEntropyLoss()(logits, target)
    found = ours.LigerCrossEntropyLoss(lse_square_scale=0.1, return_z_loss=True)(logits, target)
    assert {alone.dtype, found.loss.dtype, found.z_loss.dtype} == {dtype}
    (gradient,) = torch.autograd.grad(alone, logits)
    expected = logits.detach().double().requires_grad_()
    torch.nn.functional.cross_entropy(expected, target).backward()
    name = str(dtype).removeprefix("torch.")
    assert error(alone.detach().double(), ours.LigerCrossEntropyLoss()(expected, target).detach()) <= GRADIENT[name]
    assert error(gradient.double(), expected.grad) <= GRADIENT[name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fused_loss_is_float32_and_its_z_loss_in_the_inputs_dtype(dtype: Any) -> None:
    x, w, y, b, _ = (one.to(dtype) if one.is_floating_point() else one for one in inputs())
    found = ours.liger_fused_linear_cross_entropy(x, w, y, b, lse_square_scale=0.1, return_z_loss=True)
    alone = ours.liger_fused_linear_cross_entropy(x, w, y, b, lse_square_scale=0.1)
    assert (alone.dtype, found.loss.dtype, found.z_loss.dtype) == (torch.float32, torch.float32, dtype)


@pytest.mark.parametrize("wrong", [V, -1])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_target_out_of_bounds_of_given_logits(device: str, wrong: int) -> None:
    """Liger's AssertionError, on a GPU too, and our ValueError."""
    logits, target = torch.randn(N, V, device=device), inputs()[2].to(device)
    target[0] = -100
    assert torch.isfinite(ours.LigerCrossEntropyLoss()(logits, target))
    target[3] = wrong
    for kind in (AssertionError, ValueError):
        with pytest.raises(
            kind, match=rf"target: got id {wrong}, which is out of bounds, allowed are 0 to {V - 1} and"
        ):
            ours.LigerCrossEntropyLoss()(logits, target)


def test_no_token_counts() -> None:
    x, w, y, b, k = inputs()
    y = torch.full_like(y, -100)
    for options in ({}, {"use_token_scaling": True}, {"use_token_scaling": True, "ce_weight": k}):
        found = ours.liger_fused_linear_cross_entropy(x, w, y, b, **options, **RETURNED)
        assert (float(found.loss), float(found.z_loss), float(found.token_accuracy)) == (0, 0, 0)
        assert (found.predicted_tokens == -1).all()
        assert not any(gradient.any() for gradient in gradients(found.loss, [x, w, b]))


def test_what_is_refused() -> None:
    x, w, y, b, _ = inputs(torch.float32)
    call = ours.liger_fused_linear_cross_entropy
    with pytest.raises(NotImplementedError, match=r"accum_dtype: got torch\.float64 beside input of torch\.float32"):
        call(x, w, y, b, accum_dtype=torch.float64)
    call(*(one.detach().double() for one in (x, w)), y, accum_dtype=torch.float64)
    assert torch.equal(call(x, w, y, b, accum_dtype=torch.bfloat16, chunk_mem_const=4), call(x, w, y, b))
    for wrong in (0, True, 1.0):
        with pytest.raises(ValueError, match=r"chunk_mem_const: got .* allowed is an integer"):
            call(x, w, y, b, chunk_mem_const=wrong)
    for name in (*RETURNED, "use_token_scaling"):
        with pytest.raises(TypeError, match=f"{name}: got int 1, allowed are True and False"):
            call(x, w, y, b, **{name: 1})
    for kind in (ours.LigerFusedLinearCrossEntropyLoss, ours.LigerCrossEntropyLoss):
        with pytest.raises(ValueError, match="label_smoothing: got 2"):
            kind(label_smoothing=2.0)
        with pytest.raises(ValueError, match="reduction: got 'max'"):
            kind(reduction="max")
        with pytest.raises(ValueError, match=r"softcap: got -1\.0"):
            kind(softcap=-1.0)


# ---------------------------------------------------------------------------------------------------------------------
# Liger's own


@pytest.fixture
def theirs() -> Any:
    pytest.importorskip("liger_kernel", reason=NO_LIGER)
    if not torch.cuda.is_available():
        pytest.importorskip("triton", reason="Liger's kernels are interpreted")
    names = ("functional", "fused_linear_cross_entropy", "cross_entropy")
    modules = [importlib.import_module(f"liger_kernel.transformers.{name}") for name in names]
    functional, fused, given = modules
    return {
        "CrossEntropyOutput": functional.CrossEntropyOutput,
        "liger_fused_linear_cross_entropy": functional.liger_fused_linear_cross_entropy,
        "LigerFusedLinearCrossEntropyLoss": fused.LigerFusedLinearCrossEntropyLoss,
        "LigerCrossEntropyLoss": given.LigerCrossEntropyLoss,
    }


def test_signatures_are_ligers(theirs: Any) -> None:
    assert sorted(ours.__all__) == sorted(theirs)

    def signature(value: Any) -> list[tuple[str, Any]]:
        return [(name, one.default) for name, one in inspect.signature(value).parameters.items()]

    for name, value in theirs.items():
        assert signature(getattr(ours, name)) == signature(value), name
        if hasattr(value, "forward"):
            assert signature(getattr(ours, name).forward) == signature(value.forward), name
    fields = [[field.name for field in dataclasses.fields(kind)] for kind in (ours.CrossEntropyOutput,)]
    assert fields == [[field.name for field in dataclasses.fields(theirs["CrossEntropyOutput"])]]
    made, there = ours.LigerFusedLinearCrossEntropyLoss(), theirs["LigerFusedLinearCrossEntropyLoss"]()
    assert {key: value for key, value in vars(made).items() if not key.startswith("_") and key != "training"} == {
        key: value for key, value in vars(there).items() if not key.startswith("_") and key != "training"
    }


def needs_a_gpu(options: dict[str, Any]) -> None:
    if ("ce_weight" in options or "softcap" in options) and not torch.cuda.is_available():
        pytest.skip("Triton's interpreter hands Liger's kernels Python floats for softcap and weights, and they fail")


def on_device(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same on a GPU where there is one, as leaves."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return tuple(value.detach().to(device).requires_grad_(value.requires_grad) for value in values)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_fused_loss_is_ligers(name: str, theirs: Any) -> None:
    needs_a_gpu(OPTIONS[name])
    x, w, y, b, k = on_device(inputs(torch.float32))
    options, y = marked(OPTIONS[name], y, k.float())
    results = []
    for call in (ours.liger_fused_linear_cross_entropy, theirs["liger_fused_linear_cross_entropy"]):
        found = call(x.contiguous(), w.contiguous(), y, b, **options, **RETURNED)
        results.append((found, gradients(found.loss, [x, w, b])))
    compare(*results)


@pytest.mark.parametrize("name", [name for name in OPTIONS if "scaled" not in name])
def test_the_loss_on_logits_is_ligers(name: str, theirs: Any) -> None:
    needs_a_gpu(OPTIONS[name])
    x, w, y, b, k = on_device(inputs(torch.float32))
    options, y = marked(OPTIONS[name], y, k.float())
    if "ce_weight" in options:
        options["weight"] = options.pop("ce_weight")
    results = []
    for kind in (ours.LigerCrossEntropyLoss, theirs["LigerCrossEntropyLoss"]):
        logits = (x @ w.T + b).detach().requires_grad_()
        # Liger writes its gradient over what it is given.
        found = kind(**options, **RETURNED)(logits + 0, y)
        results.append((found, gradients(found.loss, [logits])))
    compare(*results)


def compare(mine: Any, liger: Any) -> None:
    (found, grads), (expected, their_grads) = mine, liger
    assert error(found.loss.detach().cpu(), expected.loss.detach().cpu()) <= ON_TOP_LOSS["float32"]
    assert error(found.z_loss.cpu(), expected.z_loss.detach().cpu()) <= ON_TOP_LOSS["float32"]
    assert torch.equal(found.token_accuracy, expected.token_accuracy)
    assert torch.equal(found.predicted_tokens, expected.predicted_tokens)
    for one, other in zip(grads, their_grads, strict=True):
        assert error(one.cpu(), other.cpu()) <= ON_TOP_GRADIENT["float32"]


def test_the_mean_with_class_weights_and_z_loss_differs_as_it_is_said(theirs: Any) -> None:
    """Liger: Σ ce / Σ k + Σ z / n; here (Σ ce + Σ z) / Σ k."""
    needs_a_gpu({"ce_weight": True})
    x, w, y, b, k = on_device(inputs(torch.float32))
    options, y = marked({"ce_weight": True, "lse_square_scale": 1e-1}, y, k.float())
    mine = ours.liger_fused_linear_cross_entropy(x, w, y, b, **options, return_z_loss=True)
    liger = theirs["liger_fused_linear_cross_entropy"](
        x.contiguous(), w.contiguous(), y, b, **options, return_z_loss=True
    )
    assert error(mine.loss.detach().cpu(), liger.loss.detach().cpu()) > CANCELLED
    rest, their_rest = mine.loss - mine.z_loss, liger.loss - liger.z_loss
    assert error(rest.detach().cpu(), their_rest.detach().cpu()) <= ON_TOP_LOSS["float32"]
    n, weights = (y != -100).sum(), options["ce_weight"][y[y != -100]].sum()
    assert error((mine.z_loss * weights / n).cpu(), liger.z_loss.detach().cpu()) <= ON_TOP_LOSS["float32"]
