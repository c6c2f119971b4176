"""Who may import whom: kernels <- hf_memmix <- conversion <- training, the cli on top, never family -> family."""

import ast
import functools
import re
import subprocess
import sys

import pytest

from package_modules import MODULES, ROOT, imports_of, within

# lower to upper: a layer may import itself and what stands before it
EXPERIMENTS = "hf_memmix.training.experiments"
LAYERS = ["hf_memmix_kernels", "hf_memmix", "hf_memmix.conversion", "hf_memmix.training"]
COMMANDS = [name for name in MODULES if within(name, "hf_memmix.commands")]  # stand on top


@functools.cache
def all_imports():
    """Read by the first test that needs them, not in every worker that collects the tests."""
    return [found for entry in MODULES.values() for found in imports_of(*entry)]


def layer(name):
    return max((i for i, package in enumerate(LAYERS) if within(name, package)), default=None)


def test_layers_import_downwards_only():
    wrong = [
        found
        for found in all_imports()
        if found.importer not in COMMANDS
        and layer(found.target) is not None
        and layer(found.target) > layer(found.importer)
    ]
    assert not wrong


def test_the_product_does_not_import_the_experiments():
    """They are not in the wheel. Tests of the product leave them alone, too: tests/experiments has theirs."""
    wrong = [
        found
        for found in [*all_imports(), *imports_of_tests()]
        if within(found.target, EXPERIMENTS) and not within(found.importer, EXPERIMENTS)
    ]
    assert not wrong


def imports_of_tests():
    """Imports of the tests of the product and of the kernels' benchmarks, which are no packages."""
    files = [file for folder in ("tests", "kernels/benchmarks") for file in (ROOT / folder).rglob("*.py")]
    files = [file for file in files if ROOT / "tests/experiments" not in file.parents]
    assert len(files) > 100
    return [found for file in files for found in imports_of(str(file.relative_to(ROOT)), False, file)]


def test_command_line_imports_lazily():
    """`memmix --help` loads neither the conversion nor the training, whose requirements are an extra."""
    heavy = ("torch", "transformers", "datasets", "accelerate", "hf_memmix.conversion", "hf_memmix.training")
    wrong = [
        found
        for found in all_imports()
        if found.importer in COMMANDS and not found.lazy and any(within(found.target, name) for name in heavy)
    ]
    assert not wrong
    assert not [found for found in all_imports() if found.target in COMMANDS and found.importer not in COMMANDS]


def test_kernels_need_torch_and_triton_only():
    """The folder is a Hub kernel project: it is loaded on its own, under another name.

    cuda.bindings comes with torch's wheels for CUDA; `_cuda` imports it lazily, and nothing else does.
    """
    allowed = {"torch", "triton", "hf_memmix_kernels", *sys.stdlib_module_names}
    kernels = [found for found in all_imports() if layer(found.importer) == 0]
    others = [found for found in kernels if found.target.split(".")[0] not in allowed]
    assert {tuple(found) for found in others} <= {("hf_memmix_kernels._cuda", "cuda.bindings", True)}
    absolute = [
        (name, node.lineno)
        for name, _, file in MODULES.values()
        if layer(name) == 0
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and not node.level and within(node.module or "", "hf_memmix_kernels")
    ]
    assert not absolute, "write relative imports: a kernel loaded from the Hub has another package name"


def test_triton_stays_in_the_kernels_and_is_lazy():
    users = [found for found in all_imports() if within(found.target, "triton")]
    assert not [found for found in users if layer(found.importer) != 0]
    launches = {name for name in MODULES if layer(name) == 0 and name.split(".")[-1].startswith("launch")}
    launches.add("hf_memmix_kernels._player")  # a part of `_tape`, which only launch modules import
    eager = {found.importer for found in users if not found.lazy} | launches
    assert not [
        found for found in all_imports() if found.target in eager and not found.lazy and found.importer not in eager
    ], "modules that import triton at the top are imported inside functions only"


def test_no_circular_imports():
    """Imports inside functions count as well: they would only hide a circle."""
    remaining = {
        name: {found.target for found in all_imports() if found.importer == name} & MODULES.keys() - {name}
        for name in MODULES
    }
    while free := [name for name, found in remaining.items() if not found & remaining.keys()]:
        for name in free:
            del remaining[name]
    circular = {name: sorted(found & remaining.keys()) for name, found in remaining.items()}
    assert not circular, "these modules import each other, or such modules"


def test_no_import_by_a_string():
    """The tests here would not see it. One module of the core has one: the package."""
    users = {
        name
        for name, _, file in MODULES.values()
        if layer(name) == 1
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute | ast.Name)
        and ast.unparse(node).split(".")[-1] in ("import_module", "__import__")
    }
    assert users == {"hf_memmix"}


def test_one_module_of_a_package_reads_its_environment_variables():
    readers = {
        name
        for name, _, file in MODULES.values()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and re.fullmatch(r"HF_MEMMIX_\w+", str(node.value))
    }
    assert readers == {"hf_memmix.environment", "hf_memmix_kernels._environment"}


@pytest.mark.parametrize("folder", ["mixers", "models"])
def test_no_family_imports_another(folder):
    """Code of two families belongs in a module that registers no family."""
    from hf_memmix.mixers import MIXERS
    from hf_memmix.models import FAMILIES

    registered = {"mixers": MIXERS, "models": FAMILIES}[folder]
    families = {cls.__module__ for cls in registered.values()}
    families = {name for name in families if within(name, f"hf_memmix.{folder}")}
    assert families
    assert not [
        found
        for found in all_imports()
        if found.importer in families and found.target in families and found.target != found.importer
    ]


@pytest.mark.product  # a new process
def test_what_importing_loads():
    """It works without triton, and loads no modelling code, for which `memmix --help` would wait."""
    code = "import sys; sys.modules['triton'] = None; import hf_memmix\n"
    code += "print(*(m for m in sys.modules if '.modeling_' in m)); import hf_memmix.conversion, hf_memmix.training"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    models = [name for name in result.stdout.split() if name.startswith(("hf_memmix", "transformers.models."))]
    assert not [name for name in models if ".auto." not in name]
