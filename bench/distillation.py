"""Distillation side by side: ``python -m bench distillation --framework torch``, then ``jax``.

A step is the loss and the gradients of the student's hidden states and head, in bfloat16, host included. From a
teacher's head the floor is four bare products by cuBLAS: the logits of both sides, dX and dW. Nothing makes the loss
and its gradients with fewer. Beside ours stand full logits, alone and compiled, and Liger-Kernel's two: its fused one
with a kernel, and its chunks. Liger's are at β = 0 as ours; its chunks keep their hard loss's code, with weight 0.

From given ids and their probabilities the floor is three products: rows whose ``teacher_hidden`` is 0.

``error`` is |loss − truth| / truth, of the forward KL in float64. The teacher's head is the student's with noise, so
that the divergence is small, as late in training.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from bench.registry import Results, register
from bench.shapes import Shape
from bench.variants import Variant, measured_rows, peer

# Tokens, the student's hidden size, the teacher's, entries.
PROBLEMS = ((4096, 4096, 4096, 128256), (8192, 2048, 4096, 151936), (4096, 896, 3584, 151936))
BETAS = {"forward KL": 0.0, "Jensen-Shannon": 0.5, "reverse KL": 1.0}
OURS = "logitless, "
# A budget that the logits' gradient does not fit.
TILES = 2**28
IDS = 64


def torch_problem(shape: Shape, teacher_hidden: int) -> dict[str, Any]:
    """The student's arrays, and the teacher's hidden states and head."""
    import torch

    from bench.gpu_torch import Arrays

    arrays = Arrays(shape)
    random = torch.Generator(arrays.x.device).manual_seed(1)

    def near(array: Any) -> Any:
        """The array with noise, in the teacher's size; columns beyond the student's are noise alone."""
        noise = torch.randn(len(array), teacher_hidden, device=array.device, generator=random)
        noise *= 0.1 * float(array.detach().float().std())
        width = min(teacher_hidden, array.shape[1])
        noise[:, :width] += array.detach()[:, :width].float()
        return noise.bfloat16()

    return {"arrays": arrays, "teacher_hidden": near(arrays.x), "teacher_weight": near(arrays.w)}


def torch_steps(problem: dict[str, Any], peers: bool) -> dict[str, Any]:
    """Steps by variant that leave gradients in the arrays; the floor and the forward alone leave none."""
    import torch

    from bench.gpu_torch import Step
    from logitless.torch_impl import distillation_loss

    arrays, teacher = problem["arrays"], (problem["teacher_hidden"], problem["teacher_weight"])
    x, w = arrays.x, arrays.w

    def step(loss: Callable[..., Any]) -> Step:
        def run() -> Any:
            x.grad = w.grad = None
            made = loss(x, w, *teacher)
            made.backward()
            return made

        return Step(arrays, run)

    def ours(beta: float, **options: Any) -> Callable[..., Any]:
        return lambda *heads: distillation_loss(*heads, beta=beta, **options)

    def full(x: Any, w: Any, teacher_x: Any, teacher_w: Any) -> Any:
        log_p = torch.log_softmax((teacher_x @ teacher_w.t()).float(), -1)
        log_q = torch.log_softmax((x @ w.t()).float(), -1)
        return torch.nn.functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True)

    hard = {"target": arrays.y, "nll_coef": 0.5}
    steps = {OURS + name: step(ours(beta)) for name, beta in BETAS.items()}
    steps |= {OURS + "forward KL and hard loss": step(ours(0.0, **hard))}
    steps |= {OURS + f"forward KL, {TILES >> 20} MiB": step(ours(0.0, memory_budget=TILES))}
    alone = torch.no_grad()(lambda: distillation_loss(x, w, *teacher))
    return {
        "floor": Step(arrays, torch_products(arrays, *teacher), gradients=False),
        **steps,
        OURS + "forward KL, plain operations": step(ours(0.0, backend="eager")),
        OURS + "forward KL, forward only": Step(arrays, alone, gradients=False),
        "full logits": step(full),
        **({name: step(loss) for name, loss in torch_peers(arrays, full).items()} if peers else {}),
    }


def torch_ids_steps(arrays: Any) -> dict[str, Any]:
    """The same from IDS ids a token, of which no two are equal, with 0.9 of the mass together."""
    import torch

    from bench.gpu_torch import Step
    from logitless.torch_impl import sparse_distillation_loss

    x, w, y = arrays.x, arrays.w, arrays.y
    ids = (y.unsqueeze(1) + torch.arange(IDS, device=y.device) * (len(w) // IDS)) % len(w)
    probs = torch.softmax(torch.randn(ids.shape, device=x.device), dim=1) * 0.9

    def ours(**options: Any) -> Step:
        def run() -> Any:
            x.grad = w.grad = None
            loss = sparse_distillation_loss(x, w, ids, probs, **options)
            loss.backward()
            return loss

        return Step(arrays, run)

    return {"floor": Step(arrays, torch_products(arrays), gradients=False)} | {
        OURS + name: ours(**options) for name, options in of_ids("eager").items()
    }


def of_ids(plain: str) -> dict[str, dict[str, Any]]:
    """Variants of our loss from given ids, and their options; ``plain``: the backend without kernels."""
    return {
        f"{IDS} ids and one class": {},
        f"{IDS} ids and one class, {TILES >> 20} MiB": {"memory_budget": TILES},
        f"{IDS} ids and one class, plain operations": {"backend": plain},
        f"{IDS} ids, the rest spread": {"rest": "spread"},
    }


def torch_products(arrays: Any, teacher_hidden: Any = None, teacher_weight: Any = None) -> Callable[[], object]:
    """The floor; without a teacher's head, three products."""
    import torch

    x, w = arrays.x.detach(), arrays.w.detach()
    z = torch.empty(len(x), len(w), device=x.device, dtype=x.dtype)
    dx, dw = torch.empty_like(x), torch.empty_like(w)

    def products() -> None:
        if teacher_hidden is not None:
            torch.mm(teacher_hidden, teacher_weight.t(), out=z)
        torch.mm(x, w.t(), out=z)
        torch.mm(z, w, out=dx)
        torch.mm(z.t(), x, out=dw)

    return products


def torch_peers(arrays: Any, full: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Losses of heads by name: full logits compiled, and the peers that are installed."""
    import torch

    losses: dict[str, Callable[..., Any]] = {"torch.compile, full logits": torch.compile(full)}
    if fused := peer("liger_kernel.transformers.fused_linear_jsd", "LigerFusedLinearJSD"):
        loss = fused(jsd_beta=0.0)
        losses["Liger-Kernel, fused"] = lambda *heads: loss(*heads, shift_labels=arrays.y)
    if chunked := peer("liger_kernel.chunked_loss", "LigerFusedLinearJSDLoss"):
        chunks = chunked(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0)
        losses["Liger-Kernel, chunks"] = lambda *heads: chunks(*heads, true_labels=arrays.y)
    return losses


def jax_problem(shape: Shape, teacher_hidden: int) -> dict[str, Any]:
    """As :func:`torch_problem`, but the teacher's arrays are all noise."""
    import jax
    import jax.numpy as jnp

    from bench.gpu_jax import Arrays

    def noise(key: Any, rows: int, scale: float) -> Any:
        return (jax.random.normal(key, (rows, teacher_hidden)) * scale).astype(jnp.bfloat16)

    keys = jax.random.split(jax.random.key(1), 2)
    return {
        "arrays": Arrays(shape),
        "teacher_hidden": noise(keys[0], shape.tokens, 1.0),
        "teacher_weight": noise(keys[1], shape.vocab, teacher_hidden**-0.5),
    }


def jax_steps(problem: dict[str, Any]) -> dict[str, Any]:
    """The same in JAX, the bare products by XLA."""
    import jax
    import jax.numpy as jnp

    from bench.gpu_jax import Step, compile_all
    from logitless.jax_impl import distillation_loss

    arrays = problem["arrays"]
    heads = (arrays.x, arrays.w, problem["teacher_hidden"], problem["teacher_weight"])

    def step(loss: Callable[..., Any]) -> Step:
        return Step(jax.value_and_grad(loss, argnums=(0, 1)), *heads)

    def ours(beta: float, **options: Any) -> Callable[..., Any]:
        return lambda *heads: distillation_loss(*heads, beta=beta, **options)

    def full(x: Any, w: Any, teacher_x: Any, teacher_w: Any) -> Any:
        logits = (jnp.dot(a, b.T, preferred_element_type=jnp.float32) for a, b in ((x, w), (teacher_x, teacher_w)))
        log_q, log_p = (jax.nn.log_softmax(z) for z in logits)
        return (jnp.exp(log_p) * (log_p - log_q)).sum(1).mean()

    def products(x: Any, w: Any, teacher_x: Any, teacher_w: Any) -> Any:
        z, t = x @ w.T, teacher_x @ teacher_w.T
        return z @ w, z.T @ x, t

    steps = {
        "floor": Step(products, *heads),
        **{OURS + name: step(ours(beta)) for name, beta in BETAS.items()},
        OURS + f"forward KL, {TILES >> 20} MiB": step(ours(0.0, memory_budget=TILES)),
        "full logits": step(full),
    }
    compile_all(steps.values())
    return steps


def jax_ids_steps(arrays: Any) -> dict[str, Any]:
    """As :func:`torch_ids_steps`."""
    import jax
    import jax.numpy as jnp

    from bench.gpu_jax import Step, compile_all
    from logitless.jax_impl import sparse_distillation_loss

    x, w, y = arrays.x, arrays.w, arrays.y
    ids = (y[:, None] + jnp.arange(IDS) * (len(w) // IDS)) % len(w)
    probs = jax.nn.softmax(jax.random.normal(jax.random.key(2), ids.shape), axis=1) * 0.9

    def ours(**options: Any) -> Step:
        def loss(x: Any, w: Any, ids: Any, probs: Any) -> Any:
            return sparse_distillation_loss(x, w, ids, probs, **options)

        return Step(jax.value_and_grad(loss, argnums=(0, 1)), x, w, ids, probs)

    def products(x: Any, w: Any) -> Any:
        z = x @ w.T
        return z @ w, z.T @ x

    steps = {"floor": Step(products, x, w)} | {OURS + name: ours(**options) for name, options in of_ids("xla").items()}
    compile_all(steps.values())
    return steps


def torch_error(problem: dict[str, Any], loss: float) -> float:
    """Of the forward KL of all tokens, against float64, 256 tokens at a time."""
    import torch

    arrays, total = problem["arrays"], 0.0
    heads = [a.detach().double() for a in (arrays.w, problem["teacher_weight"])]
    for rows in range(0, len(arrays.y), 256):
        hidden = (a.detach()[rows : rows + 256].double() for a in (arrays.x, problem["teacher_hidden"]))
        log_q, log_p = (torch.log_softmax(x @ w.t(), -1) for x, w in zip(hidden, heads, strict=True))
        total += float((log_p.exp() * (log_p - log_q)).sum())
    return abs(loss * len(arrays.y) / total - 1)


def is_forward(variant: str) -> bool:
    """Whether a variant's loss is the forward KL alone."""
    return variant != "floor" and (not variant.startswith(OURS) or ("forward" in variant and "hard" not in variant))


def measure(shape: Shape, teacher_hidden: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    in_torch, name = options.framework == "torch", f"{shape.tokens}x{shape.hidden}x{shape.vocab}"
    problem = (torch_problem if in_torch else jax_problem)(shape, teacher_hidden)
    steps = torch_steps(problem, options.peers) if in_torch else jax_steps(problem)
    rows = measured_rows(name, shape, _variants(steps), options.rounds)
    for row in rows:
        row |= {"teacher_hidden": teacher_hidden}
        if in_torch and "error" not in row and is_forward(row["variant"]):
            row["loss_error"] = torch_error(problem, float(steps[row["variant"]]().detach()))
    from_ids = _variants((torch_ids_steps if in_torch else jax_ids_steps)(problem["arrays"]))
    return rows + [row | {"teacher_hidden": 0} for row in measured_rows(name, shape, from_ids, options.rounds)]


def _variants(steps: dict[str, Any]) -> dict[str, Variant]:
    return {variant: step.variant() for variant, step in steps.items()}


@register(
    "distillation from a teacher's head or given ids, beside the bare products, full logits and Liger-Kernel",
    file=lambda options: "distillation_jax.json" if options.framework == "jax" else "distillation.json",
    framework="torch",
    rounds=4,
    peers=True,
    arguments={"--problems": {"nargs": "*", "metavar": "N,D,D_TEACHER,V", "help": "default: the three of the docs"}},
)
def run(options: argparse.Namespace, results: Results) -> None:
    problems = [tuple(map(int, text.split(","))) for text in options.problems or ()] or PROBLEMS
    for tokens, hidden, teacher_hidden, vocab in problems:
        shape = Shape(tokens, hidden, vocab)
        results.add(measure(shape, teacher_hidden, options))
