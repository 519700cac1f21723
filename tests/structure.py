"""What tests/test_structure.py counts, read from the sources: ``python tests/structure.py [ROOT]`` prints it."""

from __future__ import annotations

import ast
import dataclasses
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = {"core": "logitless", "torch_impl": "logitless.torch_impl"}
FOLDERS |= {"jax_impl": "logitless.jax_impl", "interop": "logitless.interop"}
MOST_LINES = 50
MOST_PARAMETERS = 8

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True)
class Module:
    """One source file of the package: its path in the repository, its name as imported, and its syntax tree."""

    path: str
    name: str
    lines: int
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        """Whether it is the ``__init__`` of a folder."""
        return self.path.endswith("__init__.py")


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module, whether that happens in a function, and the names taken from it with their local names."""

    target: str
    line: int
    lazy: bool
    names: tuple[tuple[str, str], ...] = ()
    alias: str = ""


def modules(root: Path) -> dict[str, Module]:
    """All modules of the package by name."""
    result = {}
    for folder, package in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = [package, *path.relative_to(root / folder).with_suffix("").parts]
            name = ".".join(parts).removesuffix(".__init__")
            text = path.read_text()
            result[name] = Module(path.relative_to(root).as_posix(), name, len(text.splitlines()), ast.parse(text))
    return result


def functions(tree: ast.AST, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Function, int]]:
    """Every function with its qualified name and the number of functions around it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield f"{prefix}{node.name}", node, depth
            yield from functions(node, f"{prefix}{node.name}.", depth + 1)
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.", depth)
        else:
            yield from functions(node, prefix, depth)


# ---------------------------------------------------------------------------------------------------------------------
# Imports


def imports(module: Module, known: dict[str, Module]) -> list[Import]:
    """What a module imports, its functions' imports and ``importlib.import_module("...")`` included."""
    in_functions = {id(n) for _, function, _ in functions(module.tree) for n in ast.walk(function)}
    found = []
    for node in ast.walk(module.tree):
        lazy = id(node) in in_functions
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.append(Import(alias.name, node.lineno, lazy, alias=alias.asname or alias.name))
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                base = module.name.split(".")
                base = base[: len(base) - node.level + module.is_package]
                source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                local = alias.asname or alias.name
                if f"{source}.{alias.name}" in known:
                    found.append(Import(f"{source}.{alias.name}", node.lineno, lazy, alias=local))
                else:
                    found.append(Import(source, node.lineno, lazy, names=((alias.name, local),)))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found.append(Import(name.value, node.lineno, lazy))
    return found


def edges(known: dict[str, Module], leave_out: frozenset[tuple[str, str]] = frozenset()) -> dict[str, set[str]]:
    """Which modules of the package each module imports."""
    graph: dict[str, set[str]] = {}
    for name, module in known.items():
        targets = {found.target for found in imports(module, known)}
        graph[name] = {t for t in targets if t in known and t != name and (name, t) not in leave_out}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, directly or by way of others."""

    @functools.cache
    def reached(start: str) -> frozenset[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for target in graph[waiting.pop()]:
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        return frozenset(seen)

    groups = {frozenset(other for other in reached(name) if name in reached(other)) for name in graph}
    return sorted(sorted(group) for group in groups if group)


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__")


def private_reaches(module: Module, known: dict[str, Module]) -> list[str]:
    """Each use of another module's private name, as "other module._name"."""
    found, aliases = [], {}
    for entry in imports(module, known):
        if entry.target not in known or entry.target == module.name:
            continue
        found += [f"{entry.target}.{name}" for name, _ in entry.names if is_private(name)]
        if entry.alias:
            aliases[entry.alias] = entry.target
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            target = aliases.get(ast.unparse(node.value))
            if target is not None:
                found.append(f"{target}.{node.attr}")
    return sorted(found)


# ---------------------------------------------------------------------------------------------------------------------
# Functions


def called(tree: ast.AST) -> set[str]:
    """The plain names that are called in a tree."""
    return {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def is_jitted(function: Function) -> bool:
    """Whether a function is written in Triton's or Gluon's language."""
    texts = [ast.unparse(decorator) for decorator in function.decorator_list]
    return any(text.startswith(("triton.jit", "gluon.jit", "triton.constexpr_function")) for text in texts)


def device_code(module: Module) -> set[int]:
    """The ids of the functions that run on the device: jitted ones, bodies of Pallas kernels, and what bodies call.

    In a file that imports Pallas each function inside a function counts as a body.
    """
    every = list(functions(module.tree))
    jitted = {id(function) for _, function, _ in every if is_jitted(function)}
    text = ast.unparse(module.tree)
    if "jax.experimental.pallas" not in text and "jax.experimental import pallas" not in text:
        return jitted
    bodies = [function for _, function, depth in every if depth]
    by_name = {function.name: function for _, function, depth in every if not depth}
    waiting, device = list(bodies), {id(body) for body in bodies}
    while waiting:
        for name in called(waiting.pop()) & by_name.keys():
            function = by_name[name]
            if id(function) not in device:
                device.add(id(function))
                waiting.append(function)
    return jitted | device


# Their tensors have torch.set_default_dtype's dtype and torch.set_default_device's device, unless they are told.
FILLED = ("empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randn", "zeros")


def by_default(known: dict[str, Module]) -> dict[str, str]:
    """By "path:line" the calls of these functions of PyTorch that name no dtype or no device."""
    found = {}
    for module in known.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in [f"torch.{name}" for name in FILLED]:
                named = {keyword.arg for keyword in node.keywords}
                missing = {"dtype", "device"} - named
                if missing and None not in named:  # which is **options
                    text = f"{ast.unparse(node.func)} without {', '.join(sorted(missing))}"
                    found[f"{module.path}:{node.lineno}"] = text
    return found


def exported(known: dict[str, Module]) -> set[tuple[str, str]]:
    """The public functions and classes, (module, name): what the packages' ``__all__`` lists, and that of a drop-in."""
    result = set()
    for module in known.values():
        drop_in = module.path.split("/")[1:2] == ["integrations"]
        if not module.is_package and not drop_in:
            continue
        for node in module.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                listed = set(ast.literal_eval(node.value))
                if drop_in:
                    result |= {(module.name, name) for name in listed}
                for entry in imports(module, known):
                    result |= {(entry.target, name) for name, local in entry.names if local in listed}
    # The reference of a public function takes that function's arguments.
    return result | {("logitless.reference", name) for _, name in result}


def is_public(qualified: str, function: Function, module: Module, public: set[tuple[str, str]]) -> bool:
    """Whether a user calls the function: it is exported, a method of what is exported, or a command."""
    if any(ast.unparse(decorator).startswith("app.") for decorator in function.decorator_list):
        return True
    first, *rest = qualified.split(".")
    return (module.name, first) in public and not any(is_private(part) for part in rest)


def own_lines(function: Function, device: set[int]) -> int:
    """The lines of a function, its docstring included, without the device code inside it."""
    inner = [f for _, f, depth in functions(function) if depth == 0 and id(f) in device]
    return length(function) - sum(length(f) for f in inner)


def length(function: Function) -> int:
    """From ``def`` to the last line."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def parameters(function: Function, in_class: bool) -> int:
    """The number of parameters, without ``self`` and ``cls``."""
    a = function.args
    count = len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs) + (a.vararg is not None) + (a.kwarg is not None)
    first = [argument.arg for argument in [*a.posonlyargs, *a.args][:1]]
    return count - (in_class and first in (["self"], ["cls"]))


def host_functions(known: dict[str, Module]) -> Iterator[tuple[str, int, int]]:
    """Name ("path:function"), lines and parameters of each host function that is not public."""
    public = exported(known)
    for module in known.values():
        device = device_code(module)
        for qualified, function, _ in functions(module.tree):
            if id(function) not in device and not is_public(qualified, function, module, public):
                in_class = "." in qualified
                yield f"{module.path}:{qualified}", own_lines(function, device), parameters(function, in_class)


def too_long(known: dict[str, Module]) -> dict[str, int]:
    """Host functions of more than MOST_LINES lines."""
    return {name: lines for name, lines, _ in host_functions(known) if lines > MOST_LINES}


def too_wide(known: dict[str, Module]) -> dict[str, int]:
    """Host functions of more than MOST_PARAMETERS parameters."""
    return {name: count for name, _, count in host_functions(known) if count > MOST_PARAMETERS}


def names(module: Module) -> list[str]:
    """Every name and attribute that the code uses or assigns, parameters included."""
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name):
            found.append(node.id)
        elif isinstance(node, ast.Attribute):
            found.append(node.attr)
        elif isinstance(node, ast.arg):
            found.append(node.arg)
    return found


def anys(module: Module) -> int:
    """How often the file says ``Any``, its import left out."""
    return names(module).count("Any")


# ---------------------------------------------------------------------------------------------------------------------
# The report


def folder(path: str) -> str:
    """The folder of a file."""
    return path.rsplit("/", 1)[0]


def report(root: Path) -> Iterator[str]:
    """All counts as lines of text."""
    known = modules(root)
    places = sorted({folder(module.path) for module in known.values()})
    yield f"{'folder':<28} {'files':>6} {'lines':>7} {'Any':>6}"
    for place in places:
        inside = [module for module in known.values() if folder(module.path) == place]
        yield (f"{place:<28} {len(inside):>6} {sum(m.lines for m in inside):>7} {sum(anys(m) for m in inside):>6}")
    every = list(known.values())
    yield f"{'the package':<28} {len(every):>6} {sum(m.lines for m in every):>7} {sum(anys(m) for m in every):>6}"
    for other in ("tests", "bench", "examples", "docs"):
        files = [p for p in sorted((root / other).rglob("*.py")) if "__pycache__" not in p.parts]
        yield f"{other:<28} {len(files):>6} {sum(len(p.read_text().splitlines()) for p in files):>7}"

    reaches = {module.path: private_reaches(module, known) for module in every}
    yield f"\nprivate reaches: {sum(len(found) for found in reaches.values())}"
    for path, found in reaches.items():
        if found:
            counts = {name: found.count(name) for name in sorted(set(found))}
            yield f"  {path}: {len(found)}: " + ", ".join(f"{n} x{c}" if c > 1 else n for n, c in counts.items())

    found_circles = circles(edges(known))
    yield f"\ncircles (imports in functions included): {len(found_circles)}"
    for group in found_circles:
        yield "  " + " <-> ".join(group)

    for title, counted in (
        (f"host functions over {MOST_LINES} lines, not public", too_long(known)),
        (f"host functions with over {MOST_PARAMETERS} parameters, not public", too_wide(known)),
    ):
        yield f"\n{title}: {len(counted)}"
        yield from (f"  {count:>4} {name}" for name, count in sorted(counted.items(), key=lambda e: -e[1]))

    defined = [(function, "." in name) for module in every for name, function, _ in functions(module.tree)]
    long = sum(length(function) > MOST_LINES for function, _ in defined)
    wide = sum(parameters(function, in_class) > MOST_PARAMETERS for function, in_class in defined)
    yield f"\nall functions, public ones and device code included: {len(defined)}; over {MOST_LINES} lines: {long};"
    yield f"over {MOST_PARAMETERS} parameters: {wide}"
    for word in ("made", "given"):
        used = {module.path: names(module).count(word) for module in every}
        yield f"the name {word}: {sum(used.values())} in {sum(map(bool, used.values()))} files"


if __name__ == "__main__":
    print("\n".join(report(Path(sys.argv[1] if len(sys.argv) > 1 else "."))))
