"""Every op folder has the same files, and each file contains what CONTRIBUTING.md, "Add a mixer", says of its name."""

import ast
import importlib
from pathlib import Path

import pytest
from ops_table import OPS as ROWS

import hf_memmix_kernels

ROOT = Path(hf_memmix_kernels.__file__).parent
OPS = sorted(path.parent for path in ROOT.glob("*/__init__.py"))
FILES = ("README.md", "naive.py", "op.py", "torch_path.py", "launch.py", "kernels/__init__.py")
OPTIONAL = ("arguments.py", "layer.py", "native_path.py", "sizes.py")  # what they hold is the same in every folder
LONGEST = 400  # lines
MOST_ARGUMENTS = 12  # arguments of a kernel without its constants; a tuple of tensors counts as one
# groups of every op, some of which kernels hand on without unpacking them: kernels/README.md
GROUPS = {"inputs", "outputs", "upstream", "grads", "layout"}

# of single tokens; a window, whose forward and backward are torch's. They have tests of their own
WITHOUT_STATE = ("rowwise", "window")

every_op = pytest.mark.parametrize("folder", OPS, ids=lambda path: path.name)
with_state = pytest.mark.parametrize(
    "folder", [path for path in OPS if path.name not in WITHOUT_STATE], ids=lambda path: path.name
)


def modules(folder: Path) -> list[tuple[str, ast.Module]]:
    """(path within the op's folder, syntax tree) of every module."""
    return [
        (path.relative_to(folder).as_posix(), ast.parse(path.read_text())) for path in sorted(folder.rglob("*.py"))
    ]


def imported(tree: ast.Module) -> set[str]:
    """The top-level packages that a module imports by absolute imports, at any place in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found


def functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in tree.body if isinstance(node, ast.FunctionDef)]


def decorated(tree: ast.Module, name: str) -> list[str]:
    """Functions with a decorator whose source contains `name`."""
    return [f.name for f in functions(tree) if any(name in ast.unparse(d) for d in f.decorator_list)]


def unpacked(tree: ast.Module) -> list[tuple[str, str]]:
    """(function, argument) of each group that do_not_specialize lists: Triton 3.6 specialises its members anyway."""
    found = []
    for f in functions(tree):
        listed = {
            name.value
            for decorator in f.decorator_list
            for keyword in getattr(decorator, "keywords", [])
            if keyword.arg == "do_not_specialize"
            for name in keyword.value.elts
        }
        values = {node.value.id for node in ast.walk(f) if isinstance(node, ast.Assign) and is_unpacking(node)}
        found += [(f.name, name) for name in sorted(listed & (values | GROUPS))]
    return found


def is_unpacking(node: ast.Assign) -> bool:
    """a, b = name"""
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Name)


def in_kernels(path: str) -> bool:
    return path.startswith("kernels/")


def faults(folder: Path) -> list[str]:
    """One line for every rule that an op folder does not follow."""
    found = [f"{name} is missing" for name in FILES if not (folder / name).is_file()]
    for path, tree in modules(folder):
        name = Path(path).name
        if Path(path).stem in ("torch", "triton", "numpy"):
            found.append(f"{path} hides the package of that name from its reader")
        if "triton" in imported(tree) and not in_kernels(path) and not name.startswith("launch"):
            found.append(f"{path} imports triton: only launch*.py and kernels/ may")
        if in_kernels(path):
            if "torch" in imported(tree):
                found.append(f"{path} imports torch: a kernel file holds device code only")
            host = {f.name for f in functions(tree)} - set(decorated(tree, "triton.jit"))
            found += [f"{path}: {f} has no @triton.jit; host code belongs in launch.py" for f in sorted(host)]
            found += [
                f"{path}: {f} unpacks `{name}`: do_not_specialize has no effect in it" for f, name in unpacked(tree)
            ]
            recorded = set(decorated(tree, "launched"))
            found += [
                f"{path}: {f} has no @launched: tapes would not see its launches"
                for f in decorated(tree, "triton.jit")
                if "kernel" in f and f not in recorded
            ]
            for f in functions(tree):
                # device functions without "kernel" in their names are inlined and may have more arguments
                count = sum(not (a.annotation and "constexpr" in ast.unparse(a.annotation)) for a in f.args.args)
                step = path == "kernels/step.py"  # a decode step is launched per token: a group costs host time
                if "kernel" in f.name and not step and count > MOST_ARGUMENTS:
                    found.append(
                        f"{path}: {f.name} has {count} arguments, the limit is {MOST_ARGUMENTS}; group its tensors"
                    )
        elif decorated(tree, "triton.jit"):
            found.append(f"{path} defines a kernel: kernels are in kernels/, one file per pass")
        if (decorated(tree, "custom_op") or decorated(tree, "chunk_op")) and not path.startswith("op"):
            found.append(f"{path} registers an operator with torch.library: op.py does")
        if name != "__init__.py" and not ast.get_docstring(tree):
            found.append(f"{path} has no docstring")
        if (lines := (folder / path).read_text().count("\n")) > LONGEST:
            found.append(f"{path} has {lines} lines, more than {LONGEST}")
    return found


def test_there_are_ops():
    assert {"coffee", "gka", "gla", "lattice", "short_conv", "ska"} <= {folder.name for folder in OPS}


@every_op
def test_an_op_folder_follows_the_grammar(folder):
    assert not faults(folder)


@with_state
def test_an_op_registers_its_operators(folder):
    """op.py registers operators for forward, backward and the decode step."""
    tree = ast.parse((folder / "op.py").read_text())
    names = {
        node.args[0].value.rsplit("_", 1)[-1]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("chunk_op", "step_op")
    }
    assert {"fwd", "bwd", "step"} <= names


@with_state
def test_an_op_asks_for_its_path(folder):
    """Otherwise the tests of the Triton path would run the torch path."""
    calls = [node for node in ast.walk(ast.parse((folder / "op.py").read_text())) if isinstance(node, ast.Call)]
    asked = {ast.unparse(node.args[1]) for node in calls if ast.unparse(node.func) == "use_triton"}
    assert repr(folder.name) in asked, f"op.py chooses by use_triton(x, {folder.name!r}), see _dispatch.py"


@with_state
def test_an_op_is_exported_and_tested(folder):
    exported = set(importlib.import_module(f"hf_memmix_kernels.{folder.name}").__all__)
    public = {name for name in exported if name.startswith(("chunk_", "naive_")) or name.endswith("_step")}
    assert public, "__init__.py of the op names its public functions in __all__"
    missing = public - set(hf_memmix_kernels.__all__)
    assert not missing, f"import {sorted(missing)} in hf_memmix_kernels/__init__.py and name them in its __all__"
    modules = {row.naive.__module__ for row in ROWS}
    assert f"hf_memmix_kernels.{folder.name}.naive" in modules, (
        "write the op's row of OPS in tests/kernels/ops_table.py"
    )


@every_op
def test_the_readme_names_files_that_exist(folder):
    """The table of files in the README names the modules that not every folder has, and only files that exist."""
    readme = (folder / "README.md").read_text()
    table = readme.split("| file | content |", 1)
    assert len(table) == 2, "the README has a table of files with the head `| file | content |`"
    named = set()
    for line in table[1].split("\n\n", 1)[0].splitlines()[2:]:
        named |= {part for part in line.split("|")[1].split("`") if part.endswith((".py", "/"))}
    assert named
    assert not [name for name in sorted(named) if not (folder / name).exists()]
    written = {path for path, _ in modules(folder) if not path.endswith("__init__.py")} - {*FILES, *OPTIONAL}
    covered = {path for path in written if any(path == name or path.startswith(name) for name in named)}
    assert not written - covered, "the table of files does not name these modules"


GROUPED_NUMBERS = """'S.'
@triton.jit(do_not_specialize=["sizes"])
def step_kernel(x, sizes, N: tl.constexpr):
    T, H = sizes
"""
MANY_ARGUMENTS = f"""'S.'
@triton.jit
def step_kernel({", ".join(f"x{i}" for i in range(13))}, N: tl.constexpr):
    pass
"""


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("torch.py", '"""A path."""\n', "hides the package"),
        ("sizes.py", '"""Sizes."""\nimport triton\n', "only launch*.py and kernels/ may"),
        ("launch.py", '"""Launch."""\nimport triton\n@triton.jit\ndef f(x):\n    pass\n', "defines a kernel"),
        ("kernels/forward.py", '"""Forward."""\nimport torch\n', "device code only"),
        ("kernels/forward.py", '"""Forward."""\ndef grid(x):\n    pass\n', "no @triton.jit"),
        ("kernels/forward.py", GROUPED_NUMBERS, "do_not_specialize has no effect"),
        ("kernels/forward.py", GROUPED_NUMBERS.replace("sizes", "layout"), "do_not_specialize has no effect"),
        ("kernels/forward.py", MANY_ARGUMENTS, "no @launched"),
        ("kernels/forward.py", MANY_ARGUMENTS, "13 arguments, the limit is 12"),
        ("step.py", '"""S."""\n@torch.library.custom_op("a::b")\ndef f(x):\n    pass\n', "op.py does"),
        ("sizes.py", "X = 1\n", "no docstring"),
    ],
)
def test_the_check_finds_each_fault(tmp_path, name, source, fault):
    for file in FILES:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text('"""What it is."""\n')
    assert not faults(tmp_path)
    (tmp_path / name).write_text(source)
    assert any(fault in line for line in faults(tmp_path))
    (tmp_path / "op.py").unlink()
    assert "op.py is missing" in faults(tmp_path)
