"""What PyTorch asks of the losses on top: compilation, autocast, graphs that are used twice, frozen arguments."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about PyTorch")

from logitless.tolerances import ELEMENTS  # noqa: E402
from logitless.torch_impl import (  # noqa: E402
    clipped_policy_loss,
    dense_distillation_loss,
    distillation_loss,
    dpo_loss,
    kto_loss,
    sparse_distillation_loss,
)

DISTILLATIONS = ("distillation", "class", "spread", "dense")
NAMES = ("dpo", "ipo", "cpo", "simpo", "orpo", "kto", "policy", "cispo", "sequence", *DISTILLATIONS)
# The others go the same ways through the functions: dpo's, policy's and class's.
LATE = ("ipo", "cpo", "simpo", "orpo", "cispo", "spread", "dense")
# Of these every part of the code runs in the calls above.
POLICIES: dict[str, dict[str, Any]] = {
    "policy": {"entropy_coef": 0.1, "aggregation": "sequence_mean"},
    "cispo": {"objective": "cispo", "kl_estimator": "k1", "kl_times_ratio": True, "with_entropy": True},
    "sequence": {
        "ratio": "sequence",
        "dual_clip": 2.0,
        "kl_estimator": "k2",
        "sampler_correction": "sequence_truncate",
    },
}


def make(name: str, dtype: Any = torch.float32) -> tuple[Any, dict[str, Any]]:
    """A loss as a function of hidden and weight, and these two."""
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    target = torch.randint(0, 50, (4, 6), generator=generator)
    target[:, 4:] = -100
    known = {"reference_log_prob": some(4, 6) - 4, "mask": torch.arange(6) < torch.tensor([[5], [3], [6], [0]])}
    leaves = {"hidden": some(4, 6, 8).to(dtype).requires_grad_(), "weight": some(50, 8).to(dtype).requires_grad_()}
    if name in ("dpo", "ipo", "cpo", "simpo", "orpo"):
        if name not in ("dpo", "ipo"):
            del known["reference_log_prob"]
        return lambda hidden, weight: dpo_loss(hidden, weight, target, **known, loss_type=name, nll_coef=0.5), leaves
    if name == "kto":
        known |= {"desirable": torch.tensor([1, 0, 1, 0])}
        return lambda hidden, weight: kto_loss(hidden, weight, target, **known, kl=0.2), leaves
    if name in POLICIES:
        known |= {"advantage": some(4), "old_log_prob": some(4, 6) - 4}
        if name == "sequence":
            known["sampler_log_prob"] = some(4, 6) - 4
        return lambda hidden, weight: clipped_policy_loss(
            hidden, weight, target, **known, kl_coef=0.1, **POLICIES[name]
        ), leaves
    if name in DISTILLATIONS[1:]:
        hard = {"target": target, "mask": known["mask"], "nll_coef": 0.5, "beta": 0.4}
        teacher = torch.softmax(some(4, 6, 50), -1)
        if name == "dense":
            return lambda hidden, weight: dense_distillation_loss(hidden, weight, teacher, **hard), leaves
        probs, ids = teacher.topk(3)
        return lambda hidden, weight: sparse_distillation_loss(hidden, weight, ids, probs, rest=name, **hard), leaves
    # Autocast rounds the teacher too.
    teacher = some(4, 6, 5).bfloat16().float(), torch.nn.Parameter(some(50, 5).bfloat16().float())
    return lambda hidden, weight: distillation_loss(hidden, weight, *teacher, beta=0.4, mask=known["mask"]), leaves


def value_and_grads(loss: Any, leaves: dict[str, Any]) -> list[Any]:
    made = loss(**leaves)
    return [made.detach(), *torch.autograd.grad(made, list(leaves.values()))]


@pytest.mark.late(where=lambda p: p["name"] in LATE)
@pytest.mark.case(24)
@pytest.mark.parametrize("name", NAMES)
def test_compiled_equals_eager(name: str) -> None:
    loss, leaves = make(name)
    expected = value_and_grads(loss, leaves)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=name not in DISTILLATIONS, backend="aot_eager")
    for made, value in zip(value_and_grads(compiled, leaves), expected, strict=True):
        torch.testing.assert_close(made, value)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**leaves), expected[0])
    if name in DISTILLATIONS:
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(loss, fullgraph=True, backend="aot_eager")(**leaves)


@pytest.mark.case(25)
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_autocast(name: str, hidden_dtype: Any) -> None:
    loss, leaves = make(name)
    low = {key: leaf.detach().to(torch.bfloat16).requires_grad_() for key, leaf in leaves.items()}
    expected = value_and_grads(loss, low)
    leaves["hidden"] = leaves["hidden"].detach().to(hidden_dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        made = loss(**leaves)
    grads = torch.autograd.grad(made, list(leaves.values()))
    assert made.dtype == torch.float32
    torch.testing.assert_close(made.detach(), expected[0], **ELEMENTS["another order"])
    for leaf, grad, value in zip(leaves.values(), grads, expected[1:], strict=True):
        assert grad.dtype == leaf.dtype
        torch.testing.assert_close(grad.float(), value.float(), **ELEMENTS["bfloat16 gradients"])


@pytest.mark.case(5)
@pytest.mark.parametrize("name", NAMES)
def test_two_backwards_and_a_second_derivative(name: str) -> None:
    loss, leaves = make(name)
    made = loss(**leaves)
    once, thrice = (
        torch.autograd.grad(made * factor, list(leaves.values()), retain_graph=True) for factor in (1.0, 3.0)
    )
    for one, three in zip(once, thrice, strict=True):
        torch.testing.assert_close(three, 3 * one)
    (twice,) = torch.autograd.grad(loss(**leaves), leaves["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match="is differentiable once"):
        twice.sum().backward()


@pytest.mark.case(29)
@pytest.mark.parametrize("name", NAMES)
def test_no_grad_and_inputs_unmodified(name: str) -> None:
    loss, leaves = make(name)
    kept = {key: leaf.detach().clone() for key, leaf in leaves.items()}
    trained = value_and_grads(loss, leaves)
    with torch.no_grad():
        evaluated = loss(**leaves)
    assert not evaluated.requires_grad
    torch.testing.assert_close(evaluated, trained[0])
    assert all(torch.equal(leaf, kept[key]) for key, leaf in leaves.items())


def test_a_teacher_gets_no_gradient_and_known_numbers_must_be_constants() -> None:
    x, w, teacher = (torch.randn(shape, requires_grad=True) for shape in ((4, 8), (50, 8), (50, 8)))
    distillation_loss(x, w, x.detach().requires_grad_(), teacher).backward()
    assert teacher.grad is None
    target, known = torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, requires_grad=True)
    x = torch.randn(2, 4, 8)
    with pytest.raises(
        ValueError, match="advantage: got a tensor that requires grad, allowed is a constant: detach it"
    ):
        clipped_policy_loss(x, w, target, advantage=known)
    for name in ("old_log_prob", "reference_log_prob"):
        with pytest.raises(ValueError, match=f"{name}: got a tensor that requires grad"):
            clipped_policy_loss(
                x,
                w,
                target,
                advantage=known.detach(),
                kl_coef=0.1,
                **{
                    "reference_log_prob": known.detach(),
                    name: known,
                },
            )
    with pytest.raises(ValueError, match="reference_log_prob: got a tensor that requires grad"):
        dpo_loss(x, w, target, reference_log_prob=known)
    with pytest.raises(ValueError, match="sampler_log_prob: got a tensor that requires grad"):
        clipped_policy_loss(x, w, target, advantage=known.detach(), sampler_log_prob=known)
    with pytest.raises(ValueError, match="kl: got a tensor that requires grad"):
        kto_loss(x, w, target, reference_log_prob=known.detach(), desirable=torch.ones(2), kl=known.sum())


def test_one_compiled_program_takes_every_kl() -> None:
    """KTO's estimate is another number in every step."""
    _, leaves = make("kto")
    target, known = torch.zeros(4, 6, dtype=torch.long), torch.zeros(4)

    def loss(kl: Any) -> Any:
        return kto_loss(**leaves, target=target, desirable=torch.ones(4), reference_log_prob=known, kl=kl)

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for kl in torch.tensor([0.2, 0.3, 0.7, 1.1]):
            torch.testing.assert_close(compiled(kl), loss(kl))


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_distillation_passes_gradcheck(beta: float) -> None:
    generator = torch.Generator().manual_seed(3)
    x, w, b, tx, tw = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 4), (9, 4), (9,), (5, 3), (9, 3))
    )

    def losses(x: Any, w: Any, b: Any) -> Any:
        return distillation_loss(x, w, tx, tw, b, beta=beta, reduction="none", softcap=3.0, temperature=1.5)

    assert torch.autograd.gradcheck(losses, [leaf.requires_grad_() for leaf in (x, w, b)])


@pytest.mark.gpu
@pytest.mark.case(28)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_host_synchronisation(name: str, dtype: Any) -> None:
    torch.set_default_device("cuda")
    try:
        rows = (
            torch.randn(4, 6, 8, dtype=dtype, requires_grad=True),
            torch.randn(50, 8, dtype=dtype, requires_grad=True),
        )
        known = {"mask": torch.ones(4, 6), "reference_log_prob": torch.zeros(4, 6)}
        more = {"old_log_prob": torch.zeros(4, 6), "sampler_log_prob": torch.zeros(4, 6), "dual_clip": 3.0}
        desirable = torch.ones(4)
        target, advantage = torch.zeros(4, 6, dtype=torch.long), torch.randn(4)
        teacher = torch.randn(4, 6, 5, dtype=dtype), torch.randn(50, 5, dtype=dtype)
        probs, ids = torch.softmax(torch.randn(4, 6, 50), -1).topk(3)
        dense = torch.softmax(torch.randn(4, 6, 50), -1)
    finally:
        torch.set_default_device("cpu")

    def step() -> None:
        if name in ("dpo", "ipo"):
            dpo_loss(*rows, target, **known, loss_type=name).backward()
        elif name in ("cpo", "simpo", "orpo"):
            dpo_loss(*rows, target, mask=known["mask"], loss_type=name, nll_coef=0.5).backward()
        elif name == "kto":
            kto_loss(*rows, target, **known, desirable=desirable, kl=0.2).backward()
        elif name in POLICIES:
            given = known | ({key: more[key] for key in more if key != "dual_clip" or name != "cispo"})
            clipped_policy_loss(*rows, target, advantage=advantage, **(POLICIES[name] | given), kl_coef=0.1).backward()
        elif name == "dense":
            dense_distillation_loss(*rows, dense, target=target, nll_coef=0.5, beta=0.4).backward()
        elif name in DISTILLATIONS[1:]:
            hard = {"target": target, "nll_coef": 0.5}
            sparse_distillation_loss(*rows, ids, probs, rest=name, beta=0.4, **hard).backward()
        else:
            distillation_loss(*rows, *teacher, mask=known["mask"], beta=0.4).backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_distillation_by_whole_rows_keeps_nothing_of_its_teacher() -> None:
    """Between forward and backward: the student's arrays and the gradient of the logits."""
    kept: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    x, w, teacher_x, teacher_w = (torch.randn(shape) for shape in ((6, 4), (50, 4), (6, 9), (50, 9)))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = distillation_loss(x.requires_grad_(), w.requires_grad_(), teacher_x, teacher_w, reduction="sum")
    assert torch.Size((6, 50)) in kept
    assert not [shape for shape in kept if shape[-1:] == (9,)]
    loss.backward()
    assert x.grad is not None
