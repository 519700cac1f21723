"""The command line says what the library computes, and turns mistakes into one line and exit code 2."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from implementations import uninterpreted
from typer.testing import CliRunner

import logitless
from logitless import cli, doctor
from logitless.tolerances import BOUND

WIDE = {"COLUMNS": "200"}
SIZES = {"tokens": 2048, "hidden": 512, "vocab": 32768}
SIZE_OPTIONS = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    result = CliRunner().invoke(cli.app, list(arguments), env=WIDE)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def table_rows(output: str) -> list[list[str]]:
    """Cells of the body rows of a printed table."""
    return [
        [cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if line.startswith("│")
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("800000", 800_000),
        ("17b", 17),
        ("512MiB", 512 * 1024**2),
        ("3 GiB", 3 * 1024**3),
        ("1.5GB", 1_500_000_000),
        ("0.5kib", 512),
        ("2TiB", 2 * 1024**4),
        ("9007199254740993", 9_007_199_254_740_993),
    ],
)
def test_sizes_are_read_in_bytes(text: str, count: int) -> None:
    assert cli.parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "12XB", "-3GiB", "1e9", "3 Gi B", "nan", "1..5GiB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"memory_budget: got .* allowed is a number of bytes"):
        cli.parse_bytes(text)


@given(st.integers(0, 2**62))
def test_printed_sizes_are_short_and_true(count: int) -> None:
    printed = cli.format_bytes(count)
    assert "e" not in printed
    assert len(printed) <= 8
    number, unit = printed.split()
    exact = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB", "PiB").index(unit)
    assert abs(float(number) * exact - count) <= BOUND["printed bytes"] * count


@given(st.integers(0, 10**21))
def test_printed_flops_are_short_and_true(count: int) -> None:
    printed = cli.format_flops(count)
    number, unit = printed.split()
    exact = 1000 ** ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP").index(unit)
    assert abs(float(number) * exact - count) <= BOUND["printed bytes"] * count


# ---------------------------------------------------------------------------------------------------------------------
# plan


@pytest.mark.parametrize("device", ["gpu", "cpu", "tpu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_plan_prints_the_plan_of_the_library(dtype: str, device: str) -> None:
    expected = logitless.plan(**SIZES, dtype=dtype, device=device)  # type: ignore[arg-type]
    code, output, _ = run("plan", *SIZE_OPTIONS, "--dtype", dtype, "--device", device)
    assert code == 0
    assert f"order {expected.order}, {expected.chunks} chunk(s) of at most {expected.token_chunk} tokens" in output
    assert f"({expected.scratch_bytes} bytes)" in output
    assert f"full logits and their gradient: {cli.format_bytes(expected.full_logits_bytes)}" in output


def test_the_ladder_holds_the_plans_of_the_library() -> None:
    chosen = logitless.plan(**SIZES, dtype="float32")
    code, output, _ = run("plan", *SIZE_OPTIONS, "--dtype", "float32")
    assert code == 0
    *rungs, full = table_rows(output)
    assert {row[0] for row in rungs} == {"tokens", "vocab"}
    for order, chunk, chunks, scratch, flops, cost, _ in rungs:
        rung = logitless.plan(**SIZES, dtype="float32", order=order, chunk=int(chunk))  # type: ignore[arg-type]
        assert int(chunks) == rung.chunks
        assert scratch == cli.format_bytes(rung.scratch_bytes)
        assert flops == cli.format_flops(rung.flops)
        assert float(cost) == pytest.approx(rung.relative_cost("gpu"), abs=BOUND["printed cost, absolute"])
    marked = [row for row in rungs if row[-1] == "chosen"]
    assert [(row[0], int(row[1])) for row in marked] == [(chosen.order, chosen.token_chunk)]
    assert full[0] == "full logits"
    assert full[3:5] == [cli.format_bytes(2 * 2048 * 32768 * 4), cli.format_flops(6 * 2048 * 512 * 32768)]


@pytest.mark.parametrize("order", ["tokens", "vocab"])
def test_a_budget_and_an_order_are_kept(order: str) -> None:
    budget = 96 * 1024**2
    expected = logitless.plan(**SIZES, dtype="float32", memory_budget=budget, order=order)  # type: ignore[arg-type]
    code, output, _ = run("plan", *SIZE_OPTIONS, "--dtype", "float32", "--memory-budget", "96MiB", "--order", order)
    assert code == 0
    assert expected.scratch_bytes <= budget
    assert f"({expected.scratch_bytes} bytes)" in output
    *rungs, full = table_rows(output)
    assert {row[0] for row in rungs} == {order}
    assert full[-1] == "over budget"
    for row in rungs:
        rung = logitless.plan(**SIZES, dtype="float32", order=order, chunk=int(row[1]))  # type: ignore[arg-type]
        assert (row[-1] == "over budget") == (rung.scratch_bytes > budget)


def test_a_late_upstream_gradient_costs_a_second_pass() -> None:
    code, output, _ = run("plan", *SIZE_OPTIONS, "--reduction", "none")
    assert code == 0
    assert "two passes" in output
    assert {row[4] for row in table_rows(output)[:-1]} == {cli.format_flops(8 * 2048 * 512 * 32768)}


def test_a_chunk_is_taken_as_it_is() -> None:
    code, output, _ = run("plan", *SIZE_OPTIONS, "--order", "tokens", "--chunk", "300")
    assert code == 0
    assert "7 chunk(s) of at most 300 tokens" in output


@pytest.mark.parametrize("tokens", ["0", "1", "129"])
def test_small_sizes_have_plans_too(tokens: str) -> None:
    code, output, _ = run("plan", "--tokens", tokens, "--hidden", "1", "--vocab", "1")
    assert code == 0
    assert [row[-1] for row in table_rows(output)].count("chosen") == 1


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--memory-budget", "3"], "memory_budget: got 3 bytes, allowed for tokens=2048"),
        (["--memory-budget", "lots"], "memory_budget: got 'lots', allowed is a number of bytes"),
        (["--memory-budget", "0"], "memory_budget: got 0, allowed is at least 1"),
        (["--dtype", "int8"], "dtype: got 'int8', allowed are bfloat16"),
        (["--order", "rows"], "order: got 'rows', allowed are None, 'tokens', 'vocab'"),
        (["--device", "xpu"], "device: got 'xpu', allowed are 'gpu', 'cpu', 'tpu'"),
        (["--reduction", "max"], "reduction: got 'max', allowed are 'mean', 'sum', 'none'"),
        (["--chunk", "64"], "order: got None beside chunk=64"),
        (["--hidden", "0"], "hidden: got 0, allowed is at least 1"),
        (["--tokens", "-1"], "tokens: got -1, allowed is at least 0"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(extra: list[str], words: str) -> None:
    code, output, errors = run("plan", *SIZE_OPTIONS, *extra)
    assert code == 2
    assert output == ""
    assert errors.startswith(f"error: {words}")
    assert errors.count("\n") == 1


def test_a_missing_or_malformed_option_is_exit_code_2() -> None:
    code, _, errors = run("plan", "--tokens", "2048", "--hidden", "512")
    assert code == 2
    assert "Missing option '--vocab'" in errors
    code, _, errors = run("plan", *SIZE_OPTIONS, "--tokens", "many")
    assert code == 2
    assert "Invalid value for '--tokens'" in errors


# ---------------------------------------------------------------------------------------------------------------------
# doctor


def statuses(report: doctor.Report) -> dict[str, str]:
    return {backend.backend: backend.status for backend in report.backends}


def test_doctor_prints_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    report = doctor.examine()
    monkeypatch.setattr(doctor, "examine", lambda: report)
    code, output, _ = run("doctor")
    assert code == (0 if report.healthy else 1)
    found = {row[1]: row for row in table_rows(output)[0:]}
    for backend in report.backends:
        assert found[backend.backend][:3] == [backend.framework, backend.backend, backend.status]
    for version in report.packages.values():
        assert version in output


@pytest.mark.parametrize(("framework", "portable", "fast"), [("torch", "eager", "triton"), ("jax", "xla", "pallas")])
def test_the_portable_backend_runs_and_the_fast_one_says_why_not(
    framework: str, portable: str, fast: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterpreted(monkeypatch)
    pytest.importorskip(framework, reason=f"{framework} is not installed here")
    report = doctor.try_backend(framework, portable)
    assert (report.status, "agree with the float64 reference" in report.reason) == ("runs", True), report.reason
    report = doctor.try_backend(framework, fast)
    if doctor.cuda_device_count():
        assert report.status == "runs", report.reason
        return
    assert report.status == "not here"
    why = {
        "triton": "its kernels need a CUDA device|triton is not installed",
        "pallas": "its kernels need a CUDA device, not cpu|absl-py is not installed",
    }[fast]
    assert re.search(rf"({why}).*backend='{portable}' can", report.reason), report.reason


def test_a_framework_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    report = doctor.examine()
    assert set(statuses(report).values()) == {"not here"}
    assert "pip install 'logitless[torch]'" in report.backends[0].reason
    assert "pip install 'logitless[jax]'" in report.backends[-1].reason
    assert report.healthy


def test_wrong_numbers_are_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def slightly_off(case: object, backend: str) -> tuple[dict[str, object], str]:
        from logitless import reference

        problem = doctor.BY_NAME[doctor.PROBE].case()
        exact = reference.linear_cross_entropy(problem.hidden, problem.weight, problem.target)
        values = {"loss": exact.loss, "dhidden": exact.hidden_grad, "dweight": exact.weight_grad * (1 + 1e-5)}
        return values, "cpu"

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: object())
    monkeypatch.setitem(doctor._RUNNERS, "torch", slightly_off)
    report = doctor.try_backend("torch", "eager")
    assert report.status == "wrong"
    assert "dweight is off by 1.0e-05" in report.reason
    assert "dhidden" not in report.reason
    assert "loss" not in report.reason


def test_broken_frameworks_are_reported_and_do_not_crash_it(tmp_path: Path) -> None:
    for name in ("torch", "jax"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise OSError('a library it needs is [gone]')\n")
    environment = os.environ | WIDE | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "logitless", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stdout.count("OSError: a library it needs is [gone]") == 7  # three lines of devices and four backends
    assert done.stderr == ""


# ---------------------------------------------------------------------------------------------------------------------
# doctor --model

# Class of transformers → its configuration, and what doctor says of it.
HEADS: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "LlamaForCausalLM": (
        {"hidden_size": 64, "vocab_size": 32768, "dtype": "float16"},
        ("LlamaForCausalLM, float16", "lm_head, Linear, weight [32768, 64], not tied, no bias", "softcap None"),
    ),
    "Gemma2ForCausalLM": (
        {"hidden_size": 64, "vocab_size": 32768, "final_logit_softcapping": 12.0},
        ("weight [32768, 64], tied to the embedding, no bias", "logit_scale 1, softcap 12.0"),
    ),
    "GraniteForCausalLM": (
        {"hidden_size": 64, "vocab_size": 32768, "logits_scaling": 8.0},
        ("logit_scale 0.125, softcap None",),
    ),
    "PhiForCausalLM": ({"hidden_size": 64, "vocab_size": 32768}, ("weight [32768, 64], not tied, with a bias",)),
}


def written(folder: Path, name: str, **options: object) -> str:
    """A folder with a configuration of one layer, and nothing else."""
    transformers = pytest.importorskip("transformers", reason="the models are those of transformers")
    pytest.importorskip("torch", reason="the models are made of torch's layers")
    config = getattr(transformers, name).config_class(
        architectures=[name], num_hidden_layers=1, intermediate_size=64, num_attention_heads=4, **options
    )
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", HEADS)
def test_doctor_shows_a_models_head(name: str, tmp_path: Path) -> None:
    options, words = HEADS[name]
    code, output, _ = run("doctor", "--model", written(tmp_path, name, **options), "--tokens", "4096")
    assert code == 0
    for word in (*words, "takes it"):
        assert word in output
    chosen = logitless.plan(
        tokens=4096, hidden=64, vocab=32768, dtype=str(options.get("dtype", "bfloat16")), fused=True
    )
    assert f"({chosen.scratch_bytes} bytes)" in output
    assert f"saved: {cli.format_bytes(chosen.full_logits_bytes - chosen.scratch_bytes)}" in output


def test_doctor_says_why_a_model_is_refused(tmp_path: Path) -> None:
    code, output, _ = run("doctor", "--model", written(tmp_path, "LlamaForSequenceClassification", hidden_size=64))
    assert code == 1
    assert "refuses it: module: found 0 LM heads in LlamaForSequenceClassification" in output
    assert "saved" not in output


def test_doctor_reads_no_weights_and_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model of 10 TB, without a network."""
    import socket

    monkeypatch.setattr(socket, "socket", lambda *_: pytest.fail("a connection was opened"))
    path = written(tmp_path, "LlamaForCausalLM", hidden_size=2**20, vocab_size=2**20)
    assert run("doctor", "--model", path)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("./nowhere",), "model: got './nowhere', allowed is a folder with a config.json that transformers knows"),
        (("{}", "--tokens", "-1"), "tokens: got -1, allowed"),
        (("{}", "--memory-budget", "8"), "memory_budget: got 8"),
        (("{}", "--memory-budget", "much"), "memory_budget: got 'much', allowed is a number of bytes"),
    ],
)
def test_doctor_refuses_a_wrong_question(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    path = written(tmp_path, "LlamaForCausalLM", hidden_size=64, vocab_size=512)
    code, _, errors = run("doctor", "--model", *(word.format(path) for word in arguments))
    assert code == 2
    assert words in errors


def test_doctor_refuses_a_class_that_transformers_has_not(tmp_path: Path) -> None:
    path = written(tmp_path, "LlamaForCausalLM", hidden_size=64)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "OwnForCausalLM"))
    code, _, errors = run("doctor", "--model", path)
    assert code == 2
    assert "whose architectures are ['OwnForCausalLM'], allowed is a class of transformers" in errors


# ---------------------------------------------------------------------------------------------------------------------
# demo


def fake_demo(monkeypatch: pytest.MonkeyPatch, outcome: Exception | None) -> list[tuple[object, ...]]:
    """Put a recorder in the place of the training, as if all that it needs were installed; it raises ``outcome``."""
    calls: list[tuple[object, ...]] = []

    def run_demo(text: object, output: object, *, steps: object) -> None:
        calls.append((text, output, steps))
        if outcome is not None:
            raise outcome

    stand_in = types.ModuleType("logitless.interop.demo.run")
    vars(stand_in).update(run_demo=run_demo, DisagreementError=RuntimeError)
    monkeypatch.setitem(sys.modules, "logitless.interop", types.ModuleType("logitless.interop"))
    monkeypatch.setitem(sys.modules, "logitless.interop.demo.run", stand_in)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: object())
    return calls


def test_demo_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_demo(monkeypatch, None)
    assert run("demo") == (0, "", "")
    assert run("demo", "--text", "a.txt", "--steps", "7", "--output", "new") == (0, "", "")
    assert calls == [(None, Path("demo-output"), None), (Path("a.txt"), Path("new"), 7)]


@pytest.mark.parametrize(
    ("outcome", "code"),
    [(ValueError("text: got 5 tokens, allowed is at least 1000"), 2), (RuntimeError("the runs' losses differ"), 1)],
)
def test_a_demo_that_cannot_end_well_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, outcome: Exception, code: int
) -> None:
    fake_demo(monkeypatch, outcome)
    assert run("demo") == (code, "", f"error: {outcome}\n")


def test_a_bug_in_the_demo_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_demo(monkeypatch, ValueError("shapes do not fit"))
    with pytest.raises(ValueError, match="shapes do not fit"):
        run("demo")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--text", "no/such/file"], "text: got "),
        (["--steps", "0"], "steps: got 0, allowed is at least 1"),
        (["--output", __file__], "output: got "),
    ],
)
def test_the_demo_refuses_what_cannot_work(tmp_path: Path, arguments: list[str], words: str) -> None:
    for name in cli.DEMO_PACKAGES:
        pytest.importorskip(name, reason=f"{name}, which the demo needs, is not installed here")
    code, output, errors = run("demo", "--output", str(tmp_path / "new"), *arguments)
    assert (code, output) == (2, "")
    assert errors.startswith(f"error: {words}")
    assert errors.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_demo_names_what_is_missing_and_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ("torch", "optax")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None if name in gone else object())
    code, _, errors = run("demo")
    assert code == 2
    assert (
        errors == "error: demo: not installed here: torch, optax; pip install 'logitless[demo]' brings what it needs\n"
    )


# ---------------------------------------------------------------------------------------------------------------------
# The program itself


def test_the_module_and_the_console_script_are_the_same_program() -> None:
    script = Path(sys.executable).with_name("logitless")
    outputs = []
    for command in ([sys.executable, "-m", "logitless"], [str(script)]):
        done = subprocess.run(
            [*command, "plan", *SIZE_OPTIONS],
            capture_output=True,
            text=True,
            env=os.environ | WIDE,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert "2048 tokens × 512 hidden × 32768 vocabulary, bfloat16" in outputs[0]


def test_version_and_help() -> None:
    assert run("--version") == (0, f"logitless {logitless.__version__}\n", "")
    code, output, _ = run("--help")
    assert code == 0
    for command in ("plan", "doctor", "demo"):
        assert re.search(rf"^ +{command} ", output, flags=re.MULTILINE), command
