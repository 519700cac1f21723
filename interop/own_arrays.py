"""A user's own arrays for the parity check: hidden, weight, target and perhaps bias, from .npz or .safetensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from logitless.problems import Case, Problem
from logitless.rounding import round_to
from logitless.spec import FLOAT_DTYPES, ArrayInfo, LossOptions, check_arrays, out_of_range_error

REQUIRED = ("hidden", "weight", "target")
ARRAYS = (*REQUIRED, "bias")
SAFETENSORS_DTYPES = {
    "F16": "<f2", "F32": "<f4", "F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "U8": "<u1",
}  # fmt: skip


def load_case(path: str | Path, *, dtype: str | None = None, options: LossOptions | None = None) -> Case:
    """The arrays of a file as a Case for :func:`logitless.interop.compare`.

    Args:
        path: ``.npz`` (numpy.savez) or ``.safetensors``, with hidden [..., D], weight [V, D], target [...] (any
            integers) and, if there is one, bias [V].
        dtype: "bfloat16", "float16", "float32" or "float64": the values are rounded to it and computed in it. None: the
            dtype of the file's arrays.
        options: of the loss; None: the mean of the plain loss.

    Raises ValueError or TypeError that names the file and what is wrong with it; ImportError for ``.safetensors``
    without the package safetensors.
    """
    if not isinstance(path, str | Path):
        raise TypeError(f"path: got {type(path).__name__}, allowed is a str or a pathlib.Path")
    path = Path(path)
    if path.suffix not in (".npz", ".safetensors"):
        raise ValueError(f"path: got {str(path)!r}, allowed is a file named .npz or .safetensors")
    if not path.is_file():
        raise ValueError(f"path: got {str(path)!r}, which is no file, allowed is one that exists")
    if dtype is not None and dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype: got {dtype!r}, allowed are {', '.join(FLOAT_DTYPES)}")
    if options is not None and not isinstance(options, LossOptions):
        raise TypeError(f"options: got {type(options).__name__}, allowed is a LossOptions or None")
    try:
        found = _read_npz(path) if path.suffix == ".npz" else _read_safetensors(path)
        return _case(path.name, found, dtype, options or LossOptions())
    except (TypeError, ValueError) as mistake:
        raise type(mistake)(f"arrays: {path.name}: {mistake}") from mistake


Named = dict[str, tuple[NDArray[np.number], str]]
"""Name → (array, dtype)."""


def _read_npz(path: Path) -> Named:
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: np.asarray(file[name]) for name in ARRAYS if name in file}
    except OSError as error:
        raise ValueError(f"cannot be read: {error}") from error
    for name, array in found.items():
        if array.dtype.kind == "V":
            raise TypeError(
                f"{name}: got dtype {array.dtype}, as NumPy writes a bfloat16 that it does not know, allowed are "
                "NumPy's own: save float32 and ask for dtype bfloat16, or use safetensors"
            )
    return {name: (array, array.dtype.name) for name, array in found.items()}


def _read_safetensors(path: Path) -> Named:
    """bfloat16 comes as float32."""
    try:
        from safetensors import SafetensorError, deserialize
    except ImportError as error:
        raise ImportError(
            f'arrays: {path.name} needs the package safetensors: pip install "logitless[safetensors]"',
            name="safetensors",
        ) from error
    try:
        parts = deserialize(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot be read: {error}") from error
    return {
        name: _decoded(name, str(part["dtype"]), part["shape"], part["data"]) for name, part in parts if name in ARRAYS
    }


def _decoded(name: str, kind: str, shape: Sequence[int], data: bytes) -> tuple[NDArray[np.number], str]:
    """A tensor of a safetensors file: its bytes as NumPy takes them."""
    if kind == "BF16":  # the upper half of a float32
        bits = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(shape), "bfloat16"
    if kind not in SAFETENSORS_DTYPES:
        raise TypeError(f"{name}: got dtype {kind}, allowed are BF16, {', '.join(SAFETENSORS_DTYPES)}")
    array = np.frombuffer(data, SAFETENSORS_DTYPES[kind]).reshape(shape)
    return array, array.dtype.name


def _case(name: str, found: Named, dtype: str | None, options: LossOptions) -> Case:
    missing = [array for array in REQUIRED if array not in found]
    if missing:
        raise ValueError(f"got no {', '.join(missing)}, allowed are arrays named {', '.join(ARRAYS)}")
    target, target_dtype = found["target"]
    if not np.issubdtype(target.dtype, np.integer):
        raise TypeError(f"target: got dtype {target_dtype}, allowed are integers")
    infos = {key: ArrayInfo(array.shape, dtype or kind) for key, (array, kind) in found.items()}
    infos["target"] = ArrayInfo(target.shape, "int64")
    check_arrays(infos["hidden"], infos["weight"], infos["target"], infos.get("bias"))
    weight = found["weight"][0]
    outside = ((target < 0) | (target >= weight.shape[0])) & (target != options.ignore_index)
    if outside.any():
        position = tuple(int(axis[0]) for axis in np.nonzero(outside))
        raise out_of_range_error(position, int(target[position]), weight.shape[0], options.ignore_index)
    chosen = infos["hidden"].dtype
    vocab, size = weight.shape
    problem = Problem(name, target.shape, size, vocab, dtype=chosen, options=options, bias="bias" in found)
    floats = {key: round_to(found[key][0], chosen) for key in found if key != "target"}
    per_token = options.reduction == "none"
    upstream = np.ones(target.shape, np.float32) if per_token else np.asarray(1.0, np.float32)
    return Case(
        problem, floats["hidden"], floats["weight"], target.astype(np.int64), floats.get("bias"), None, None, upstream
    )
