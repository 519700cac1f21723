"""The benches' own arithmetic: rows, floors, bursts, results files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from implementations import interpreted

sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench import all as everything
from bench import check, checkout, compare, energy, machine, products, registry, report, sanitize, timing
from bench.shapes import Shape, named
from bench.variants import Variant, measured_rows
from logitless import plan
from logitless.tolerances import ELEMENTS


def refuse() -> int:
    raise MemoryError("too large")


def test_a_row_is_a_median_over_the_faster_floor() -> None:
    times = {"slow floor": [8.0, 9.0, 4.0], "fast floor": [2.0, 7.0, 4.0], "ours": [5.0, 6.0, 100.0]}
    left = {name: iter(values) for name, values in times.items()}
    variants = {name: Variant(lambda: 10, lambda name=name: [next(left[name])], 20) for name in times}
    variants["broken"] = Variant(refuse, list)
    rows = measured_rows("s", Shape(2, 3, 4), variants, 3, ("slow floor", "fast floor"))
    made = {row.pop("variant"): row for row in rows}
    assert {name: row.get("time_ms") for name, row in made.items()} == {
        "slow floor": 8.0, "fast floor": 4.0, "ours": 6.0, "broken": None,
    }  # fmt: skip
    assert [made[name]["over_floor"] for name in times] == [2.0, 1.0, 1.5]
    assert made["broken"]["error"] == "MemoryError: too large"
    assert made["ours"]["scratch_bytes"] == 10
    assert made["ours"]["promised_bytes"] == 20


def test_a_burst_divides_by_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that takes 0.05 s a step and 0.02 s to say that it is done."""
    clock = {"host": 0.0, "device": 0.0}

    def step() -> None:
        clock["device"] = max(clock["device"], clock["host"]) + 0.05

    def wait() -> None:
        clock["host"] = max(clock["host"], clock["device"]) + 0.02

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock["host"])
    (made,) = timing.burst_ms(step, wait)
    assert made == pytest.approx(50 + 20 / 3)  # 0.2 s hold three steps of 0.07 s


def test_power_lies_between_moves_of_the_counter() -> None:
    """A counter that moves every 0.1 s by what was spent: 300 W, and 700 W from 1 s on."""
    now = {"time": 0.0}

    def joules() -> float:
        moved = int(now["time"] * 10 + 1e-9) / 10
        return 300 * moved + 400 * max(0.0, moved - 1)

    meter = energy.Meter(joules, lambda: now["time"])
    for step in range(2001):
        now["time"] = step / 1000
        meter.note()
    assert meter.watts(0.05, 0.95) == pytest.approx(300)
    assert meter.watts(1.05, 1.95) == pytest.approx(700)
    assert meter.watts(0.55, 1.55) == pytest.approx((300 * 4 + 700 * 5) / 9)
    with pytest.raises(ValueError, match=r"window: got 0\.080 s with 1 moves of the counter, allowed is 2"):
        meter.watts(1.06, 1.14)


def test_energy_is_of_the_median_round_over_the_floor() -> None:
    measured = {"floor": [(10.0, 600.0), (20.0, 700.0), (30.0, 650.0)], "triton": [(21.0, 700.0)] * 3}
    rounds = {name: [{"time_ms": t, "watts": w} for t, w in made] for name, made in measured.items()}
    floor, ours = energy.rows_of("s", {"tokens": 2}, rounds)
    assert (floor["variant"], floor["time_ms"], floor["joules"], floor["over_floor"]) == ("floor", 20.0, 14.0, 1.0)
    assert [one["joules"] for one in floor["rounds"]] == [6.0, 14.0, 19.5]
    assert (ours["shape"], ours["tokens"], ours["joules"]) == ("s", 2, 14.7)
    assert (ours["over_floor"], ours["joules_over_floor"]) == pytest.approx((1.05, 1.05))
    row = {"hidden": 3, "vocab": 4}
    assert report.energy_table([floor | row, ours | row]).splitlines()[2:] == [
        "| 2 × 3 × 4 | floor | 20.00 (10.00 to 30.00) | 1.000 | 650 | 14.00 (6.00 to 19.50) | 1.000 |",
        "| 2 × 3 × 4 | triton | 21.00 (21.00 to 21.00) | 1.050 | 700 | 14.70 (14.70 to 14.70) | 1.050 |",
    ]


@interpreted
def test_products_alone_have_the_operands_of_the_step() -> None:
    import torch

    from logitless.torch_impl import linear_cross_entropy

    # Eighths and whole numbers: their products and sums are exact. Rounded logits of this size would differ with the
    # order of their sums, and put gradients further apart than is allowed below.
    torch.manual_seed(0)  # a row whose gradient is nearly 0 has no direction to compare
    x = ((8 * torch.randn(70, 32)).round() / 8).requires_grad_()
    w = (8 * torch.randn(130, 32)).round().requires_grad_()
    y, sizes = torch.randint(0, 130, (70,)), {"tokens": 70, "hidden": 32, "vocab": 130, "dtype": "float32"}
    arrays = SimpleNamespace(x=x, w=w)

    def step(chunk: int = 70) -> Any:
        chosen = plan(**sizes, fused=True, order="tokens", chunk=chunk)
        return lambda: linear_cross_entropy(x, w, y, plan=chosen, backend="triton").backward()

    made = products.products(arrays, step())
    assert list(made) == ["first product", "dW", "dX"]
    z = (x @ w.t()).detach()
    others = torch.softmax(z, 1) * (1 - torch.nn.functional.one_hot(y, 130))  # the targets are not in the matrix
    # Rows of dX are relative to each row's anchor, and some rows are rescued and have another.
    shown = {"first product": torch.clone, "dW": torch.clone, "dX": torch.nn.functional.normalize}
    expected = {"first product": z, "dW": others.t() @ x.detach(), "dX": shown["dX"](others @ w.detach())}
    for product, pair in made.items():
        for other in made.values():  # what came before leaves nothing behind
            other.restore()
            other.steps[list(other.steps)[1]]()
        pair.restore()
        assert list(pair.steps) == [f"{product}, cuBLAS", f"{product}, triton"]
        torch.testing.assert_close(shown[product](pair.steps[f"{product}, cuBLAS"]()), expected[product])
    with pytest.raises(ValueError, match=r"step: got .*'dX': 2.* launches of the products, allowed is one of each"):
        products.products(arrays, step(35))


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_what_has_changed_since_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkout that came without its history, that is not known."""
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    def described(commit: str | None = None) -> tuple[Any, Any]:
        made = machine.describe(commit)
        return made["commit"], made["changes_since_commit"]

    assert described() == ("unknown", None)
    assert described("given") == ("given", None)
    measured = tmp_path / machine.MEASURED[0] / "plan.py"
    measured.parent.mkdir()
    measured.write_text("1")
    identity = "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"
    for command in ["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]:
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    commit, changes = described()
    assert (len(commit), changes) == (12, False)
    measured.write_text("2")
    assert described() == (commit, True)
    subprocess.run(["git", *identity, "commit", "-qam", "second"], cwd=tmp_path, check=True)
    assert described(commit) == (commit, True)  # the one that is named, not the newest
    assert described("given") == ("given", None)

    # Only code counts, and only below the paths that are asked for.
    newest = str(machine.describe()["commit"])
    other = tmp_path / "other.py"
    assert machine.has_changed(newest) is False
    for text, changed in (('"""Says more."""\n2  # two', False), ("3", True)):
        measured.write_text(text)
        assert machine.has_changed(newest) is changed
        assert machine.has_changed(newest, paths=("other.py",)) is False
    other.write_text("new")
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    assert machine.has_changed(newest, paths=("other.py",)) is True
    assert machine.has_changed("0" * 40) is None


def test_code_without_its_text() -> None:
    told = 'def f(a):\n    """Doc."""\n    # why\n    return (\n        a + 1\n    )\n'
    told += 'class C:\n    x: int\n    """Field."""'
    assert machine.code_of(told) == machine.code_of("def f(a): return a + 1\nclass C:\n  x: int")
    assert machine.code_of(told) != machine.code_of("def f(a): return a + 2\nclass C:\n  x: int")
    assert machine.code_of('def f():\n    """Doc."""') == machine.code_of("def f(): pass")
    assert machine.code_of('x = "a"') != machine.code_of('x = "b"')


def test_an_update_keeps_the_other_part(tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.json"
    kept = {"machine": {"commit": "old"}, "rows": [{"a": 1}], "errors": [], "tests_exit_status": 0}
    earlier.write_text(json.dumps(kept | {"jax_machine": {"commit": "old"}, "jax_rows": [{"b": 1}], "jax_errors": [3]}))
    results = check.Parts(tmp_path / "gpu_check.json", [str(earlier)])
    results.run("jax", {"commit": "new"}, iter([("jax_rows", [{"b": 2}]), ("jax_rows", [{"b": 3}])]))
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    # What the part did not come to is left out, not taken from the earlier file.
    assert written == {"benchmark": "check"} | kept | {
        "jax_machine": {"commit": "new"},
        "jax_rows": [{"b": 2}, {"b": 3}],
    }


def test_rows_only_keep_the_other_shapes(tmp_path: Path) -> None:
    machine = {"gpu": "H200", "versions": {"torch": "2"}, "commit": "old"}
    rows = [{"shape": shape, "time_ms": 1} for shape in ("liger", "llama", "odd")]
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps({"machine": machine, "rows": rows, "errors": [{"a": 1}], "sweeps": [2]}))
    results = check.Parts(tmp_path / "gpu_check.json", [str(earlier)])
    now = {"gpu": "H200", "versions": {"torch": "2", "quack-kernels": "1"}, "commit": "new"}
    made = {"shape": "llama", "time_ms": 3}
    results.replace_rows("machine", now, iter([("rows", [made]), ("errors", [{"a": 4}])]))
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    assert written["rows"] == [rows[0], made | {"commit": "new"}, rows[2]]
    assert written["errors"] == [{"a": 4, "commit": "new"}]
    assert (written["machine"], written["sweeps"]) == (machine, [2])
    for other in ({"gpu": "H100"}, {"versions": {"torch": "3"}}):
        with pytest.raises(ValueError, match="rows: got"):
            results.replace_rows("machine", now | other, iter([("rows", [made])]))


def test_a_peer_that_was_not_found_keeps_its_row(tmp_path: Path) -> None:
    """Full logits keep theirs, too; and a package that is not installed has no version to compare."""
    machine = {"gpu": "H200", "versions": {"torch": "2"}, "commit": "old"}
    names = "triton, 614 MiB", "QuACK", "Liger-Kernel", "torch, full logits"
    rows = [{"shape": "llama", "variant": name, "time_ms": 1} for name in names]
    earlier = tmp_path / "earlier.json"
    with_quack = machine | {"versions": {"torch": "2", "quack-kernels": "1"}}
    earlier.write_text(json.dumps({"machine": with_quack, "rows": rows}))
    results = check.Parts(tmp_path / "gpu_check.json", [str(earlier)])
    made = [{"shape": "llama", "variant": name, "time_ms": 2} for name in ("triton", "Liger-Kernel")]
    results.replace_rows("machine", machine | {"commit": "new"}, iter([("rows", made)]))
    written = json.loads((tmp_path / "gpu_check.json").read_text())["rows"]
    assert [(row["variant"], row["time_ms"], row["commit"]) for row in written] == [
        ("triton", 2, "new"), ("Liger-Kernel", 2, "new"), ("QuACK", 1, "old"), ("torch, full logits", 1, "old")
    ]  # fmt: skip


def test_rows_of_a_shape_from_another_file(tmp_path: Path) -> None:
    machine = {"gpu": "H200", "versions": {"torch": "2"}, "commit": "old"}
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    rows = [{"shape": shape, "time_ms": 1} for shape in ("liger", "llama", "odd")]
    first.write_text(json.dumps({"machine": machine, "rows": rows, "token_rows": [1]}))
    made = [rows[0] | {"time_ms": 2}, *(row | {"time_ms": 2, "commit": "new"} for row in rows[1:])]
    there = machine | {"commit": "there"}
    second.write_text(json.dumps({"machine": there, "rows": made, "token_rows": [2], "token_machine": 3}))
    check.Parts(tmp_path / "gpu_check.json", [str(first), f"{second}:liger,llama,tokens"])
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    assert written["rows"] == [made[0] | {"commit": "there"}, made[1], rows[2]]
    assert (written["token_rows"], written["token_machine"], written["machine"]) == ([2], 3, machine)
    second.write_text(json.dumps({"machine": machine | {"gpu": "H100"}, "rows": made}))
    with pytest.raises(ValueError, match="rows: got"):
        check.Parts(tmp_path / "gpu_check.json", [str(first), f"{second}:llama"])


@pytest.mark.parametrize("more", [[], ["--update", "earlier.json", "--per-token"]])
def test_rows_only_refuse_what_they_would_leave_out(
    more: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        registry.main(["check", "--output", str(tmp_path), "--rows-only", *more])
    assert "--rows-only: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_machine_without_a_gpu_leaves_the_results_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "gpus_here", lambda: 0)
    monkeypatch.setattr(check, "run_tests", lambda *_: pytest.fail("it began"))
    with pytest.raises(SystemExit):
        registry.main(["check"])
    assert "--output: got " in capsys.readouterr().err


def test_first_calls_are_each_in_a_process_that_finds_nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = []

    def run(command: list[str], *, env: dict[str, str], **options: Any) -> SimpleNamespace:
        assert "gpu.first_call_seconds(" in command[-1]
        cache = Path(env["TRITON_CACHE_DIR"])
        assert not list(cache.iterdir())
        (cache / "kernel").touch()
        caches.append(cache)
        return SimpleNamespace(stdout=b'a warning\n{"small": 2.5}\n')

    monkeypatch.setattr(check.subprocess, "run", run)
    assert list(check.first_call_part(2)) == [("first_call_s", [{"small": 2.5}])] * 2
    assert len(set(caches)) == 2
    assert not any(cache.exists() for cache in caches)


def test_first_calls_in_jax_are_without_a_cache_and_then_with_a_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run(command: list[str], *, env: dict[str, str], **options: Any) -> SimpleNamespace:
        cache = Path(env["JAX_COMPILATION_CACHE_DIR"]) if "JAX_COMPILATION_CACHE_DIR" in env else None
        full = cache is not None and bool(list(cache.iterdir()))
        if cache is not None:
            (cache / "program").touch()
        calls.append((command[-1].split("'jax', ")[1].split(")")[0], cache is not None, full))
        return SimpleNamespace(stdout=b'{"small": 1.5}\n' if full else b'{"small": 4.5}\n')

    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(check.subprocess, "run", run)
    rows = [row for _, part in check.jax_first_call_part(1) for row in part]
    assert rows == [
        {"kind": kind, "cache": cache, "small": 1.5 if cache else 4.5}
        for kind in check.FIRST_CALLS
        for cache in (False, True)
    ]
    one = [(False, False), (True, False), (True, True)]
    assert calls == [(repr(kind), *how) for kind in check.FIRST_CALLS for how in one]


def test_an_update_takes_parts_of_several_files(tmp_path: Path) -> None:
    files = []
    for number in range(3):
        files.append(tmp_path / f"{number}.json")
        values = dict.fromkeys(("machine", "token_machine"), number) | {"rows": [number], "jax_rows": [number]}
        files[-1].write_text(json.dumps(values | {"tests_commit": "a"}))
    first, second, third = map(str, files)
    made = check.Parts(tmp_path / "made.json", [first, f"{second}:tokens", f"{third}:torch,tokens"]).values
    assert made == {"machine": 2, "rows": [2], "token_machine": 2, "jax_rows": [0], "tests_commit": "a"}
    assert check.Parts(tmp_path / "made.json", []).values == {}


def test_the_results_folder_is_there_before_anything_is_measured(tmp_path: Path) -> None:
    """Otherwise what took minutes would be lost at its end."""
    check.Parts(tmp_path / "a" / "b" / "gpu_check.json", [])
    assert json.loads((tmp_path / "a" / "b" / "gpu_check.json").read_text()) == {"benchmark": "check"}
    registry.Results(tmp_path / "c" / "found.json", "found", {})
    assert (tmp_path / "c").is_dir()


def test_a_results_file_has_the_machine_the_options_and_what_there_is_so_far(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    options = {"rounds": 2, "checkout": Path("a"), "output": tmp_path, "commit": "abc"}
    results = registry.Results(file, "found", options)
    for count in (1, 2):
        results.add([{"time_ms": count}])
        written = json.loads(file.read_text())
        assert list(written) == ["benchmark", "machine", "options", "rows"]
        assert written["rows"] == [{"time_ms": 1}, {"time_ms": 2}][:count]
    assert (written["machine"]["commit"], written["options"]) == ("abc", {"rounds": 2, "checkout": "a"})
    results.add([{"b": 1}], "products")
    assert json.loads(file.read_text())["products"] == [{"b": 1}]


def test_the_command_lists_every_benchmark_without_a_framework(tmp_path: Path) -> None:
    """As does the help of each."""
    code = "import sys\nfrom bench import registry\nregistry.parser().print_help()\n"
    code += "assert not {'torch', 'jax', 'matplotlib', 'logitless'} & set(sys.modules), 'imported'"
    told = subprocess.run([sys.executable, "-c", code], cwd=registry.ROOT, capture_output=True, text=True, check=True)
    lines = [line.split()[0] for line in told.stdout.splitlines() if line.startswith("    ") and line[4] != " "]
    assert lines == ["NAME", *registry.MODULES] or lines == list(registry.MODULES)
    for name in registry.MODULES:
        with pytest.raises(SystemExit) as ended:
            registry.main([name, "--help"])
        assert ended.value.code == 0


@pytest.mark.parametrize("shape", ["liger", "4096x512x32768", "big", "4096x512"])
def test_shapes_are_named_or_have_three_sizes(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    if shape in ("big", "4096x512"):
        with pytest.raises(SystemExit):
            registry.parser().parse_args(["energy", "--shapes", shape])
        assert f"--shapes: got '{shape}', allowed are liger, " in capsys.readouterr().err
    else:
        assert registry.parser().parse_args(["energy", "--shapes", shape]).shapes == [shape]
        assert named(shape).hidden in (512, 4096)


def test_the_checkouts_packages_are_found_by_other_processes(tmp_path: Path) -> None:
    """Every folder and file of them; of another checkout before this one's."""
    for name in ("torch_impl/kernels", "jax_impl", "interop", "core/pipelines"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "core" / "__init__.py").write_text("where = 'there'")
    (tmp_path / "core" / "pipelines" / "__init__.py").touch()
    (tmp_path / "torch_impl" / "kernels" / "hopper.py").write_text("value = 7")
    code = "import logitless.pipelines; from logitless.torch_impl.kernels import hopper; import bench.shapes\n"
    code += "print(logitless.where, hopper.value)"
    before = list(sys.path), os.environ.get("PYTHONPATH")
    with checkout.packages(), checkout.packages(tmp_path):
        told = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["there", "7"]
    assert (list(sys.path), os.environ.get("PYTHONPATH")) == before


def test_a_models_table_and_plot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A variant that failed at a batch, one that is not installed, one without a peak, the largest batch of one."""
    pytest.importorskip("matplotlib", reason="the report draws with it")
    from bench import plots

    common = {"layers": 2, "hidden": 32, "vocab": 64, "sequence": 16, "dtype": "float32"}
    rows = [
        {"variant": "transformers", "batch": 1, "step_ms": 8.04, "tokens_per_s": 1990.6, "peak_bytes": 3 << 29},
        {"variant": "transformers", "batch": 4, "error": "OutOfMemoryError: out of memory. Tried | to allocate"},
        {"variant": "transformers", "largest_batch": 3},
        {"variant": "Liger-Kernel", "error": "not installed: liger_kernel"},
        {"variant": "logitless", "batch": 4, "step_ms": 2.0, "tokens_per_s": 32000.0, "peak_bytes": None},
    ]
    assert report.hf_table(rows).splitlines()[2:] == [
        "| transformers | 1 | 8.0 | 1991 | 1.5 | 3 |",
        "| transformers | 4 | OutOfMemoryError: out of memory | – | – | 3 |",
        "| Liger-Kernel | – | not installed: liger_kernel | – | – | – |",
        "| logitless | 4 | 2.0 | 32000 | – | – |",
    ]
    drawn = []
    monkeypatch.setattr(plots.plt, "close", drawn.append)
    path = tmp_path / "hf.png"
    plots.hf({"machine": {"gpu": None, "cpu": "a CPU"}, "rows": [common | row for row in rows]}, path)
    speed, memory = drawn[0].axes
    assert [label.get_text() for label in speed.get_yticklabels()] == ["transformers\nlargest batch 3", "logitless"]
    assert [bar.get_width() for bar in speed.patches] == [1990.6, 32000.0]
    assert [bar.get_width() for bar in memory.patches] == [1.5, 0.0]
    assert path.stat().st_size > 1000


def test_a_heads_table() -> None:
    sizes = {"batch": 2, "length": 33, "hidden": 8, "vocab": 101}
    rows = [
        sizes | {"variant": "full logits", "error": "CUDA out of memory"},
        sizes | {"variant": "logitless", "time_ms": 1.234, "scratch_bytes": 5 << 19, "loss": 4.5},
    ]
    assert report.gist_table(rows).splitlines()[2:] == [
        "| 2 × 33 × 8 × 101 | full logits | out of memory | – | – |",
        "| 2 × 33 × 8 × 101 | logitless | 1.23 | 2 | 4.500000 |",
    ]


@pytest.mark.parametrize("chunk", [16, 64])
def test_a_jax_step_writes_over_its_last_results(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The floor's products are right, in one chunk and in several, and their memory is used again and again."""
    pytest.importorskip("jax", reason="the bench of JAX needs it")
    from bench import floor, gpu_jax

    monkeypatch.setattr(floor, "FLOOR_CHUNK", chunk)
    arrays = gpu_jax.Arrays(Shape(64, 24, 96))
    # A function of its own: what JAX has traced once it does not trace again.
    step = gpu_jax.Step(lambda x, w: floor.xla_floor(x, w), arrays.x, arrays.w)
    gpu_jax.compile_all([step])
    first = step()
    dx, dw = step()
    assert all(array.is_deleted() for array in first)
    x, w = (np.asarray(a, np.float64) for a in (arrays.x, arrays.w))
    np.testing.assert_allclose(np.asarray(dx, np.float64), x @ w.T @ w, **ELEMENTS["bfloat16 products"])
    np.testing.assert_allclose(np.asarray(dw, np.float64), (x @ w.T).T @ x, **ELEMENTS["bfloat16 products"])
    assert str(dw.dtype) == ("float32" if chunk < 64 else "bfloat16")
    assert 0 < step.scratch_bytes() < 2**20


def test_a_step_that_does_not_compile_says_so_when_it_runs() -> None:
    jax = pytest.importorskip("jax", reason="the bench of JAX needs it")
    from bench import gpu_jax

    def wrong(x: Any) -> Any:
        raise NotImplementedError("not here")

    step = gpu_jax.Step(wrong, jax.numpy.ones(2))
    gpu_jax.compile_all([step])
    with pytest.raises(NotImplementedError, match="not here"):
        step()


def test_the_bench_of_given_logits_measures_what_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the bench is of both frameworks")
    pytest.importorskip("jax", reason="the bench is of both frameworks")
    from bench import logits

    monkeypatch.setattr(timing, "WARM_S", 1e-3)
    monkeypatch.setattr(timing, "TIMED_S", 1e-3)
    rows = logits.measure(4, 300, 1, with_peers=False)
    made = {row["variant"]: row for row in rows}
    assert len(made) == len(rows) == 11
    portable = {"floor", "torch.nn.functional", "jnp, log_softmax"}
    portable |= {f"{ours}{place}" for ours in ("torch, eager", "jax, xla") for place in ("", ", in place")}
    for name, row in made.items():
        assert "time_ms" in row or name not in portable, row
        if "time_ms" in row:
            assert row["gb_per_s"] * row["time_ms"] * 1e6 == pytest.approx(3 * 4 * 300 * 2)


def test_steps_in_place_leave_the_gradient_where_the_logits_were() -> None:
    torch = pytest.importorskip("torch", reason="the bench is of both frameworks")
    jax = pytest.importorskip("jax", reason="the bench is of both frameworks")
    from bench import logits
    from logitless import jax_impl, torch_impl

    arrays, seen = logits.TorchArrays(4, 300), []

    def loss(z: Any, y: Any) -> Any:
        seen.append(z.detach())
        return torch_impl.cross_entropy(z, y, inplace_backward=True)

    (true,) = arrays.step(torch_impl.cross_entropy)()
    step = arrays.overwriting_step(loss)
    step()
    assert torch.equal(seen[0], true)
    step()
    assert seen[0].data_ptr() == seen[1].data_ptr()
    z, y = jax.numpy.asarray(arrays.logits.float().cpu().numpy()), jax.numpy.asarray(arrays.target.cpu().numpy())
    (true,) = jax.jit(jax.grad(jax_impl.cross_entropy, argnums=(0,)))(z, y)
    donated = logits.DonatedStep(jax_impl.cross_entropy, z, y)
    given = donated.logits
    donated()
    assert given.is_deleted()
    assert np.array_equal(donated.logits, true)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_of_tests_that_is_cut_short_has_told_its_failures(
    workers: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second test ends its process, and with it pytest: as a time limit would."""
    if workers:
        pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    tests = tmp_path / "test_two.py"
    end = f"os.kill(os.get{'ppid' if workers else 'pid'}(), 9)"  # xdist's workers are its children
    tests.write_text(
        f"import os, time\n\ndef test_one():\n    assert 1 == 2\n\ndef test_two():\n    time.sleep(1)\n    {end}\n"
    )
    more = ["-n", str(workers)] if workers else []
    log = tmp_path / "tests.txt"
    assert check.run_tests([str(tests), *more], log) != 0
    for told in (capfd.readouterr().out, log.read_text()):
        assert "assert 1 == 2" in told
        assert "failed in" not in told


def test_what_a_sanitizer_found() -> None:
    """Three races: one between accesses of the dispatch, one with a write of the kernel's own, one in a helper."""
    lines = sanitize.SPECIALISED["hopper.py"].read_text().splitlines()
    kernel, helper, dispatch, own = (
        1 + next(i for i, line in enumerate(lines) if text in line)
        for text in ("def logits_kernel(", "def put(", "gl.warp_specialize(", "stage.store(piece)")
    )
    text = f"""
========= COMPUTE-SANITIZER
ran: one chunk
========= Error: Race reported between Read access at logits_kernel+0x110 in hopper.py:{kernel}
=========     and Write access at logits_kernel+0xaf40 in hopper.py:{kernel} [235 hazards]
=========     and Write access at logits_kernel+0xbf40 in hopper.py:{dispatch} [2 hazards]
=========
ran: chunks
========= Error: Race reported between Read access at logits_kernel+0x110 in hopper.py:{kernel}
=========     and Write access at logits_kernel+0xcf40 in hopper.py:{own} [2 hazards]
=========
========= Error: Race reported between Read access at logits_kernel+0x110 in hopper.py:{kernel}
=========     and Write access at logits_kernel+0xdf40 in hopper.py:{helper} [2 hazards]
=========
========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)
"""
    found = sanitize.findings(text)
    assert found["summary"] == "RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)"
    assert found["ran"] == ["one chunk", "chunks"]
    assert (found["races"], found["races_of_dispatch"]) == (3, 1)
    assert found["kernels"] == {"logits_kernel": 7}
    assert found["first_report"][0].startswith("Error: Race reported between Read access at logits_kernel")
    assert sanitize.findings("killed")["summary"] is None


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_what_runs_under_a_sanitizer_is_a_call(framework: str) -> None:
    for name in sanitize.CALLS:
        case, options = sanitize.arguments(name, framework, "bfloat16")
        assert case.hidden.shape == (sanitize.TOKENS, sanitize.HIDDEN)
        assert "plan" not in options or options["plan"].chunks > 1
        assert "plan" not in options or options["plan"].padded == (framework == "jax")


def test_a_comparison_is_of_rounds_and_not_of_medians() -> None:
    row = compare.row_of("s", "ours", {"before": [1.0, 2.0, 4.0], "after": [1.1, 4.0, 4.0]})
    assert (row["before_ms"], row["after_ms"], row["ratio"]) == (2.0, 4.0, 1.1)


def test_a_comparisons_process_answers_what_it_was_asked(tmp_path: Path) -> None:
    """On a checkout of an imaginary version, whose process is told the shape first and then each variant."""
    pytest.importorskip("torch", reason="the comparison is of PyTorch's steps")
    steps = 'import bench.compare; bench.compare.variants = lambda *asked: ({"a": dict, "b": dict}, lambda: asked)'
    site = tmp_path / "site"
    for folder in ("core", "torch_impl", "jax_impl", "interop", "site"):
        (tmp_path / folder).mkdir()
    (site / "sitecustomize.py").write_text(steps)
    with checkout.packages(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ["PYTHONPATH"]]))
        side = compare.Side(tmp_path, "torch", 0.01)
        side.start("liger")
        assert side.answer() == ["a", "b"]
        side.start("b")
        assert 0 < side.answer() < 1000
        side.end()


@pytest.mark.parametrize(("framework", "kernels"), [("torch", "eager"), ("jax", "xla")])
def test_what_is_compared_are_steps_that_can_be_waited_for(
    framework: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The portable backend stands in for the kernels."""
    pytest.importorskip(framework, reason="the steps are this framework's")
    from bench import gpu

    monkeypatch.setattr(gpu.importlib.import_module(f"bench.gpu_{framework}").Arrays, "kernels", kernels)
    steps, wait = compare.variants(framework, "64x24x96")
    assert list(steps) == ["floor", kernels]
    for step in steps.values():
        step()
    wait()


# ---------------------------------------------------------------------------------------------------------------------
# Log-probabilities of a real head


def test_errors_of_log_probs() -> None:
    from bench import rl
    from bench.report import rl_table

    truth = np.full(2 * rl.PIECE, -3.0)
    errors = np.zeros_like(truth)
    errors[: rl.PIECE - 1], errors[-1] = 0.001, -0.5
    row = rl.row_of("rounded", truth + errors, truth, kl=np.array([0.0, 0.5]))
    assert row["mean_error"] == pytest.approx(np.abs(errors).mean())
    assert row["max_error"] == pytest.approx(0.5)
    assert row["text_error"] == pytest.approx((rl.PIECE - 1) * 0.001)
    assert row["off_by_1_percent"] == 1 / len(truth)
    assert row["quantiles"][0] == 0.0
    assert row["quantiles"][-1] == 0.5
    assert (row["kl_mean"], row["kl_max"]) == (0.25, 0.5)
    assert rl_table([row]).splitlines()[-1] == "| rounded | 0.00099 | 0.001 | 0.5 | 0.51 | 0.1 % | 0.25 | 0.5 |"


def test_of_logits_is_the_softmax_of_rounded_ones() -> None:
    torch = pytest.importorskip("torch", reason="the variants are PyTorch's")
    from bench import rl

    z = torch.randn(3, 40) * 8
    exact = torch.log_softmax(z.double(), dim=-1)
    errors = {name: float((of(z).double() - exact).abs().max()) for name, of in rl.of_logits().items()}
    assert errors["float32 logits"] < errors["float16 logits, float32 softmax"] / 100
    assert errors["float16 logits, float32 softmax"] < errors["bfloat16 logits, float32 softmax"]


# ---------------------------------------------------------------------------------------------------------------------
# bench all


def test_every_results_file_has_a_task() -> None:
    """And every task is a command that its benchmark takes."""
    committed = {file.name for file in registry.RESULTS.glob("*.json")}
    assert committed <= {task.file for task in everything.TASKS}
    for task in everything.TASKS:
        registry.parser().parse_args([*task.command, "--output", "x", "--commit", "c"])
    assert set(everything.SHAPES) <= {task.shape for task in everything.TASKS}


def test_every_task_says_what_it_depends_on() -> None:
    """Paths that exist, its own benchmark, and what several benchmarks share; no other benchmark that it does not
    import."""
    for task in everything.TASKS:
        for path in task.measures:
            found = list(everything.ROOT.glob(path.removeprefix(":(glob)")))
            assert found, (task.name, path)
    shared = {"bench/gpu_torch.py", "bench/gpu_jax.py", "bench/shapes.py", "bench/timing.py"}
    assert shared | {"bench/gist.py"} <= everything.files_of("gist")
    assert not everything.files_of("gist") & {"bench/energy.py", "bench/report.py", "bench/fuzzing/data.py"}
    assert {"bench/architectures.py", "bench/portable.py"} <= everything.files_of("small")
    assert "bench/fuzzing/run_jax.py" not in everything.files_of("gist")
    assert {"bench/fuzz.py", "bench/fuzzing/data.py"} <= everything.files_of("fuzz")


def written(folder: Path, task: everything.Task, commit: str) -> None:
    rows = [
        {"shape": "liger", "variant": "ours", "commit": commit},
        {"shape": "liger", "variant": "QuACK", "commit": "x"},
    ]
    registry.write_json(folder / task.file, {task.machine: {"commit": commit}, "rows": rows})


def test_all_runs_what_is_stale_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One result is of this commit, one of another, one misses, one fails, one is too long, one wants two GPUs."""
    tasks = {
        "rows": everything.Task("rows.json", ("check", "--shapes", "liger"), 1, 1.0, everything.TORCH, shape="liger"),
        "old": everything.Task("old.json", ("gist",), 1, 1.0, everything.TORCH),
        "new": everything.Task("new.json", ("logits",), 1, 1.0, everything.TORCH),
        "bad": everything.Task("bad.json", ("energy",), 1, 1.0, everything.TORCH),
        "long": everything.Task("long.json", ("hf",), 1, 99.0, everything.TORCH),
        "two": everything.Task("two.json", ("sharded",), 2, 1.0, everything.TORCH),
    }
    written(tmp_path, tasks["rows"], "abc")
    written(tmp_path, tasks["old"], "def")
    ran: list[str] = []

    def ran_as(command: list[str], **_: Any) -> SimpleNamespace:
        name = next(name for name, task in tasks.items() if task.command[0] == command[3])
        assert command[-4:] == ["--output", str(tmp_path), "--commit", "abcdef"]
        ran.append(name)
        if name != "bad":
            written(tmp_path, tasks[name], "abcdef")
        return SimpleNamespace(returncode=int(name == "bad"))

    monkeypatch.setattr(everything, "TASKS", tuple(tasks.values()))
    monkeypatch.setattr(everything, "gpus_here", lambda: 1)
    monkeypatch.setattr(everything.subprocess, "run", ran_as)
    arguments = ["all", "--output", str(tmp_path), "--commit", "abcdef"]
    assert registry.main([*arguments, "--list"]) == 1
    assert not ran
    assert capsys.readouterr().out.count("STALE") == 5
    assert registry.main([*arguments, "--minutes", "50"]) == 1
    assert ran == ["old", "new", "bad"]
    assert registry.main([*arguments, "--minutes", "50"]) == 1
    assert ran == ["old", "new", "bad", "bad"]
    assert registry.main(arguments) == 1
    assert ran[4:] == ["bad", "long"]
    written(tmp_path, tasks["bad"], "abcdef")
    assert registry.main(arguments) == 0
    assert registry.main([*arguments, "--tasks", "2", "6"]) == 0  # stale or not; the second wants two GPUs
    assert ran[6:] == ["old"]
