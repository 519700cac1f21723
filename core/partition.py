"""How many layers each pipeline stage gets, with the embedding and the head counted. No framework, integers out."""

from __future__ import annotations

from logitless.spec import check_count, check_flags, check_number


def layer_partition(
    layers: int,
    stages: int,
    *,
    head_cost: float = 0.5,
    embedding_cost: float = 0.25,
    min_layers: int = 1,
    v_shaped: bool = False,
) -> list[int]:
    """Layers per pipeline stage, in order, such that the largest load of a stage is as small as it can be.

        load(stage) = its layers + embedding_cost on the first stage + head_cost on the last

    With ``v_shaped`` it is the largest load of a rank: of rank r, which holds stages r and stages − 1 − r.

    The rule: every stage starts with ``min_layers`` layers and its fixed cost; each further layer goes to the stage
    with the smallest load, of several to the earliest. With the defaults a remainder therefore goes to stages in the
    middle first, then to the first stage, and never to the last: (27, 8) gives [3, 4, 4, 4, 3, 3, 3, 3].

    A V-shaped schedule (DualPipeV, ZBV) gives each rank two stages, and one of them both embedding and head. There each
    further layer goes to the rank with the smallest load, and within it to the stage with the smaller one, of equals to
    the earliest. So no rank's load can be made smaller at the cost of another, and a rank's layers are split as evenly
    as its costs allow.

    Costs are in units of one layer's memory: weights with their gradients and optimizer state, and what a micro-batch
    keeps for the backward. The head's weights are V × D; the loss adds several tensors of logits to that where logits
    are held, and next to nothing with ``linear_cross_entropy``. While both costs stay below one layer, as the defaults
    do, no two stages differ by more than one layer (two, if ``v_shaped``). A tied weight counts on each stage that
    holds a copy.

    Arguments:
        layers: number of layers, at least min_layers · stages.
        stages: number of pipeline stages, at least 1. A stage that holds several chunks (interleaved schedules) is as
            many entries. An even number beside ``v_shaped``.
        head_cost, embedding_cost: at least 0, in layers.
        min_layers: layers that every stage has at least; 0 lets a stage hold nothing but the head or the embedding.
        v_shaped: whether stages r and stages − 1 − r are on one rank.

    Returns: list[int] of length ``stages`` whose sum is ``layers``.

    Raises ValueError or TypeError naming the argument, what came and what is allowed.

    >>> layer_partition(32, 8)
    [4, 4, 4, 4, 4, 4, 4, 4]
    >>> layer_partition(32, 8, head_cost=2.4, embedding_cost=2.4)
    [2, 5, 5, 5, 5, 4, 4, 2]
    >>> layer_partition(32, 8, head_cost=2.4, embedding_cost=2.4, v_shaped=True)
    [3, 5, 5, 5, 4, 4, 4, 2]
    """
    check_count("stages", stages, 1)
    check_count("min_layers", min_layers, 0)
    check_count("layers", layers, min_layers * stages, f", min_layers · stages = {min_layers} · {stages}")
    check_flags(v_shaped=v_shaped)
    if v_shaped and stages % 2:
        raise ValueError(f"stages: got {stages}, allowed beside v_shaped is an even number: every rank has two")
    check_number("head_cost", head_cost, low=0.0)
    check_number("embedding_cost", embedding_cost, low=0.0)
    counts, fixed = [min_layers] * stages, [0.0] * stages
    fixed[0] += embedding_cost
    fixed[-1] += head_cost

    def load(*of: int) -> float:
        return sum(counts[stage] + fixed[stage] for stage in of)

    ranks = [(stage, stages - 1 - stage) for stage in range(stages // 2)] if v_shaped else [(s,) for s in range(stages)]
    for _ in range(layers - min_layers * stages):
        lightest = min(ranks, key=lambda rank: load(*rank))
        counts[min(lightest, key=load)] += 1
    return counts
