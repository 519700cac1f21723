"""The demo from end to end at a tiny size, and what it refuses."""

# ruff: noqa: E402 -- the imports below fail where the demo's packages are missing: skip first

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the demo trains in both frameworks and needs torch")
pytest.importorskip("jax", reason="the demo trains in both frameworks and needs jax")
for package in ("matplotlib", "optax", "tokenizers"):
    pytest.importorskip(package, reason=f"the demo needs {package}: pip install 'logitless[demo]'")

import torch
from rich.console import Console

from logitless.interop import to_jax
from logitless.interop.demo import run as demo
from logitless.interop.demo.run import (
    RELATIVE_TOLERANCE,
    RUN_NAMES,
    DemoResult,
    DisagreementError,
    jax_model,
    run_demo,
    torch_model,
)
from logitless.interop.demo.settings import DemoSettings, TrainingRun, initial_parameters
from logitless.interop.demo.text import encode, make_batches, read_text, train_tokenizer
from logitless.tolerances import BOUND, ELEMENTS

TINY = DemoSettings(
    vocabulary=400, width=16, layers=2, heads=2, sequence=16, batch=8, steps=12, learning_rate=1e-2, text_bytes=60_000
)
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def silent() -> Console:
    return Console(file=io.StringIO(), width=100)


@dataclasses.dataclass(frozen=True)
class Finished:
    result: DemoResult
    printed: str
    folder: Path


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One whole demo, which the tests below look at from several sides."""
    folder = tmp_path_factory.mktemp("demo") / "new" / "folder"
    console = silent()
    result = run_demo(output=folder, settings=TINY, console=console)
    assert isinstance(console.file, io.StringIO)
    return Finished(result, console.file.getvalue(), folder)


class TestWholeDemo:
    def test_the_three_runs_agree_at_every_step(self, finished: Finished) -> None:
        losses = finished.result.losses
        assert losses.shape == (3, TINY.steps)
        assert np.isfinite(losses).all()
        # Far below the demo's own tolerance: nothing but float32 rounding, amplified by a dozen updates.
        assert finished.result.largest_relative_difference < BOUND["demo"] < RELATIVE_TOLERANCE

    def test_the_first_loss_is_that_of_a_uniform_guess_and_then_it_falls(self, finished: Finished) -> None:
        losses = finished.result.losses
        np.testing.assert_allclose(
            losses[:, 0], math.log(finished.result.vocabulary), atol=BOUND["first loss of the demo, absolute"]
        )
        assert (losses[:, -3:].mean(axis=1) < losses[:, 0] - 0.5).all()

    def test_the_picture_is_a_png_of_a_readable_size(self, finished: Finished) -> None:
        content = finished.result.picture.read_bytes()
        assert content.startswith(PNG_SIGNATURE)
        assert content.rstrip().endswith(b"IEND\xaeB`\x82")
        width, height = struct.unpack(">II", content[16:24])
        assert width >= 1000
        assert height >= 600

    def test_the_numbers_hold_everything(self, finished: Finished) -> None:
        numbers = json.loads(finished.result.numbers.read_text())
        assert [run["name"] for run in numbers["runs"]] == list(RUN_NAMES)
        np.testing.assert_array_equal([run["losses"] for run in numbers["runs"]], finished.result.losses)
        assert numbers["largest_relative_difference"] == finished.result.largest_relative_difference
        assert numbers["settings"]["steps"] == TINY.steps
        assert {"python", "torch", "jax"} <= set(numbers["versions"])

    def test_two_files_and_nothing_else(self, finished: Finished) -> None:
        assert sorted(path.name for path in finished.folder.iterdir()) == ["curves.png", "results.json"]
        assert sorted(finished.folder.parent.iterdir()) == [finished.folder]

    def test_the_scratch_is_less_than_with_full_logits(self, finished: Finished) -> None:
        """A tiny problem saves little, but the full logits must show in the full-logits numbers."""
        logits_bytes = 4 * TINY.batch * TINY.sequence * finished.result.vocabulary
        for run in finished.result.runs:
            assert run.full_logits_scratch_bytes >= logits_bytes
            assert 0 < run.scratch_bytes <= run.full_logits_scratch_bytes
        assert finished.result.runs[2].scratch_bytes == finished.result.runs[1].full_logits_scratch_bytes

    def test_times_are_of_every_step(self, finished: Finished) -> None:
        for run in finished.result.runs:
            assert len(run.training.step_times_s) == TINY.steps
            assert 0 < run.training.median_step_s < 10

    def test_the_table_shows_losses_differences_times_and_scratch(self, finished: Finished) -> None:
        printed = finished.printed
        for words in ("loss at step 1 ", f"loss at step {TINY.steps} ", "median time per step", "scratch of the loss"):
            assert words in printed
        assert printed.count(f"{finished.result.losses[0, 0]:.6f}") >= 1
        assert "standard library" in printed
        assert str(finished.result.picture) in printed.replace("\n", "")

    def test_a_second_demo_replaces_its_own_files(self, finished: Finished) -> None:
        demo._check_output(finished.folder)


class TestText:
    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", "which is empty, allowed is a file with text in it"),
            (b" \n\t \n", "which is empty, allowed is a file with text in it"),
            (b"two words\n", r"\d tokens, allowed is at least 136 \(8 sequences of 17\)"),
            (b"fine \xff\xfe no", r"which is not UTF-8 \(byte 5: invalid start byte\), allowed is text in UTF-8"),
            (b"cut \xe2\x82", r"which is not UTF-8 \(byte 4: unexpected end of data\)"),
        ],
        ids=["empty", "blank", "short", "not_utf8", "cut_character"],
    )
    def test_a_text_that_cannot_serve(self, tmp_path: Path, content: bytes, words: str) -> None:
        path = tmp_path / "text.txt"
        path.write_bytes(content)
        output = tmp_path / "output"
        with pytest.raises(ValueError, match=f"^text: got .*{words}"):
            run_demo(path, output, settings=TINY, console=silent())
        assert not output.exists()

    def test_a_missing_file_and_a_folder(self, tmp_path: Path) -> None:
        for path in (tmp_path / "none.txt", tmp_path):
            with pytest.raises(ValueError, match=r"^text: got .* which cannot be read \(.*\), allowed is a text file"):
                run_demo(path, tmp_path / "output", settings=TINY, console=silent())

    def test_a_limit_inside_a_character_cuts_it_off(self, tmp_path: Path) -> None:
        path = tmp_path / "text.txt"
        path.write_text("€€€", encoding="utf-8")
        assert read_text(path, 7).text == "€€"
        assert read_text(path, 9).text == "€€€"
        assert read_text(path, 7).source == f"the beginning of {path}"
        assert read_text(path, 9).source == str(path)

    def test_the_standard_library_is_the_same_every_time_and_limited(self) -> None:
        first, second = read_text(None, 200_000), read_text(None, 200_000)
        assert first == second
        assert 200_000 <= len(first.text.encode()) < 700_000
        assert "import" in first.text

    def test_tokens_give_the_text_back(self) -> None:
        text = 'def f(x):\r\n\treturn "naïve €uro 🙂"\n\n\n  # last line without an end'
        tokenizer = train_tokenizer(text * 20, 320)
        assert tokenizer.get_vocab_size() <= 320
        assert tokenizer.decode(encode(tokenizer, text).tolist()) == text
        long = "ab" * 5000 + "\n"
        assert tokenizer.decode(encode(tokenizer, long).tolist()) == long
        unseen = "Ωμέγα \x00\x7f"
        assert tokenizer.decode(encode(tokenizer, unseen).tolist()) == unseen

    def test_batches_are_windows_of_the_text_and_seeded(self) -> None:
        tokens = np.arange(1000, dtype=np.int32)
        batches = make_batches(tokens, TINY)
        assert batches.shape == (TINY.steps, TINY.batch, TINY.sequence + 1)
        assert batches.dtype == np.int32
        assert (np.diff(batches, axis=-1) == 1).all()
        np.testing.assert_array_equal(batches, make_batches(tokens, TINY))
        other = make_batches(tokens, dataclasses.replace(TINY, seed=1))
        assert (batches != other).any()

    def test_the_shortest_text_that_serves(self) -> None:
        needed = TINY.batch * (TINY.sequence + 1)
        assert make_batches(np.zeros(needed, np.int32), TINY).shape[0] == TINY.steps
        with pytest.raises(ValueError, match=f"^text: got {needed - 1} tokens"):
            make_batches(np.zeros(needed - 1, np.int32), TINY)


class TestOutput:
    @pytest.mark.parametrize("name", ["curves.png", "results.json"])
    @pytest.mark.parametrize("content", [b"", b"{}", PNG_SIGNATURE, b'{"program": "another"}'])
    def test_files_of_others_are_refused_and_kept(self, tmp_path: Path, name: str, content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"^output: got .* whose {name} the demo has not written"):
            run_demo(output=tmp_path, settings=TINY, console=silent())
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert (tmp_path / name).read_bytes() == content

    def test_other_files_in_the_folder_do_not_matter(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        demo._check_output(tmp_path)
        demo._make_output(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]

    def test_a_file_in_place_of_the_folder(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_text("mine")
        with pytest.raises(ValueError, match=r"^output: got .* which is a file, allowed is a folder"):
            run_demo(output=path, settings=TINY, console=silent())
        assert path.read_text() == "mine"

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_text("mine")
        with pytest.raises(
            ValueError, match=r"^output: got .*, where nothing can be written \(.+\), allowed is a writ"
        ):
            run_demo(output=path / "folder", settings=TINY, console=silent())

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def read_only(**_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(demo.tempfile, "TemporaryFile", read_only)
        with pytest.raises(ValueError, match=r"^output: got .*, where nothing can be written \(Permission denied\)"):
            run_demo(output=tmp_path, settings=TINY, console=silent())


class TestDisagreement:
    """The comparison can go red."""

    @pytest.mark.every_value
    @pytest.mark.parametrize("wrong", [1.005, 0.995, math.nan])
    @pytest.mark.parametrize("run", [0, 1, 2])
    def test_one_wrong_loss_is_an_error_and_leaves_the_evidence(
        self, finished: Finished, tmp_path: Path, run: int, wrong: float
    ) -> None:
        runs = list(finished.result.runs)
        losses = list(runs[run].training.losses)
        losses[4] *= wrong
        training = dataclasses.replace(runs[run].training, losses=tuple(losses))
        runs[run] = dataclasses.replace(runs[run], training=training)
        picture, numbers = tmp_path / "curves.png", tmp_path / "results.json"
        spoiled = dataclasses.replace(finished.result, runs=tuple(runs), picture=picture, numbers=numbers)
        with pytest.raises(
            DisagreementError, match=r"allowed is 1e-03; the first such step is 5: JAX, logitless \S+, "
        ):
            demo._report(spoiled, silent())
        assert picture.exists()
        assert numbers.exists()

    def test_a_wrong_gradient_is_seen_in_the_losses(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Adam hides a gradient's scale, so the fault is in its direction: the head's gradient is missing."""
        right = torch_model.logitless_loss
        monkeypatch.setattr(
            torch_model, "logitless_loss", lambda x, head, target: right(x, head.detach() + 0 * head, target)
        )
        with pytest.raises(DisagreementError):
            run_demo(output=tmp_path, settings=TINY, console=silent())

    def test_shared_parameters_that_were_written_to(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        right = torch_model.train

        def spoil(initial: Any, *arguments: Any) -> TrainingRun:
            initial["head"][0, 0] += 1
            return right(initial, *arguments)

        monkeypatch.setattr(torch_model, "train", spoil)
        with pytest.raises(RuntimeError, match="has written to the initial parameters"):
            run_demo(output=tmp_path, settings=dataclasses.replace(TINY, steps=1), console=silent())


class TestModel:
    """The two models are the same functions."""

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array) for name, array in initial_parameters(TINY, TINY.vocabulary).items()}

    def test_hidden_states_agree_and_are_causal(self) -> None:
        tensors = {name: 10 * tensor for name, tensor in self.tensors().items()}  # large: attention far from uniform
        arrays = {name: to_jax(tensor) for name, tensor in tensors.items()}
        tokens = torch.tensor([[random.Random(7).randrange(TINY.vocabulary) for _ in range(TINY.sequence)]])
        in_torch = torch_model.hidden_states(tensors, tokens, TINY)
        in_jax = jax_model.hidden_states(arrays, to_jax(tokens), TINY)
        np.testing.assert_allclose(np.asarray(in_jax), in_torch.numpy(), **ELEMENTS["models in two frameworks"])

        changed = tokens.clone()
        changed[0, 9] = (changed[0, 9] + 1) % TINY.vocabulary
        difference = (torch_model.hidden_states(tensors, changed, TINY) - in_torch).abs().amax(-1)[0]
        assert (difference[:9] == 0).all()
        assert (difference[9:] > 0).all()

    def test_initial_parameters_are_seeded(self) -> None:
        def digest(settings: DemoSettings) -> str:
            parts = (array.tobytes() for _, array in sorted(initial_parameters(settings, 300).items()))
            return hashlib.sha256(b"".join(parts)).hexdigest()

        assert digest(TINY) == digest(TINY) != digest(dataclasses.replace(TINY, seed=1))

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"steps": 0}, "steps: got 0, allowed is at least 1"),
            ({"vocabulary": 255}, "vocabulary: got 255, allowed is at least 256"),
            ({"heads": 3}, "width: got 16, allowed is a multiple of heads = 3"),
        ],
    )
    def test_settings_that_cannot_work(self, changes: dict[str, int], words: str) -> None:
        with pytest.raises(ValueError, match=f"^{words}"):
            dataclasses.replace(TINY, **changes)
