"""The tests of serving run in an environment of their own, with vLLM: `make serve-test`, on a CPU or on a GPU.

Elsewhere (`make test`) nothing here is collected: vLLM pins other versions of torch and transformers.

All references are computed by one process without vLLM. Meanwhile the tests begin with the models that are ready.
Engines run in the process of the tests, one at a time.
"""

import gc
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import unittest.mock
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

HERE = Path(__file__).parent

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["*.py"]
else:
    # what this version of vLLM is refused for. The file is read alone, because its package imports triton
    versions = SimpleNamespace(**runpy.run_path(str(HERE.parents[1] / "hf_memmix/serving/vllm/versions.py")))
    found = versions.numbers_of(versions.installed_version())
    since = {"test_speculation.py": versions.SPECULATION_SINCE, "test_states.py": versions.STATES_SINCE}
    collect_ignore = [file for file, oldest in since.items() if found < oldest]

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # tracebacks of the engine, and its scheduler within reach
    "VLLM_NO_USAGE_STATS": "1",
}
ON_GPU = torch.cuda.is_available()
if ON_GPU:
    # vLLM's attention in fp32 would multiply with the 10 bits of TF32, which is Triton's default
    SETTINGS["TRITON_F32_DEFAULT"] = "ieee"
else:
    SETTINGS["HF_MEMMIX_BACKEND"] = "torch"
# on a GPU several processes may test at once: an engine takes this memory for states and keys, and does not measure
# how much is free
ON_A_GPU = {"kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.05}
for name, value in SETTINGS.items():
    os.environ.setdefault(name, value)


def pytest_addoption(parser):
    parser.addoption("--matrix", metavar="FILE", help="add which model was tested with which feature to FILE")


class Matrix:
    """Collects the outcomes of the tests over models: a test without "test_" is a feature.

    The decoder families are left out, because README.md has a list of them.
    """

    def __init__(self, file: Path):
        self.file, self.outcomes = file, {}

    def pytest_runtest_logreport(self, report):
        from serving_cases import CASES

        test, _, case = report.nodeid.split("::")[-1].rstrip("]").partition("[")
        if case in CASES and test != "test_family" and (report.when == "call" or report.failed):
            feature = test.removeprefix("test_").replace("_", " ")
            case = case.removesuffix("_bf16")
            self.outcomes.setdefault(feature, {})[case] = "yes" if report.passed else "no"

    def pytest_sessionfinish(self):
        import transformers
        import vllm

        versions = {module.__name__: module.__version__ for module in (vllm, torch, transformers)}
        if ON_GPU:
            versions["device"] = torch.cuda.get_device_name()
        earlier = json.loads(self.file.read_text()) if self.file.exists() else {}
        matrix = earlier["matrix"] if earlier.items() >= versions.items() else {}
        for feature, cases in self.outcomes.items():
            matrix[feature] = matrix.get(feature, {}) | cases
        self.file.write_text(json.dumps(versions | {"matrix": matrix}, indent=1) + "\n")


def pytest_configure(config):
    if config.getoption("matrix"):
        config.pluginmanager.register(Matrix(Path(config.getoption("matrix"))))


@pytest.fixture(scope="session")
def folders(request, tmp_path_factory):
    """The folder that gets a folder with model and references for each case of the collected tests.

    A process fills it, in the order of the tests; `references.ready` waits for a case.
    """
    from references import LOG
    from serving_cases import CASES

    import child

    root = tmp_path_factory.mktemp("models")
    wanted = dict.fromkeys(value for item in request.session.items for value in _strings(item) if value in CASES)
    script = [sys.executable, str(HERE / "references.py"), str(root), *wanted]
    env = child.child_env(PYTHONPATH=os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parents[1])]))
    with (root / LOG).open("w") as log:
        process = subprocess.Popen(script, env=env, stdout=log, stderr=log)
    yield root
    process.terminate()
    process.wait(60)


def _strings(item):
    """The parameters of a test that may be names of cases, those of fixtures too."""
    parameters = getattr(item, "callspec", None)
    for value in parameters.params.values() if parameters else ():
        yield from value if isinstance(value, tuple) else (value,)
    marker = item.get_closest_marker("cases")
    yield from marker.args if marker else ()


class Engines:
    """Makes vLLM's engines; one lives at a time, and it is kept while the same one is asked for.

    The start and the end of an engine search for garbage nine times, which would take most of its time. So all that
    was imported is frozen, and one search after each engine looks at it, too.
    """

    def __init__(self, folders: Path):
        self.folders, self.key, self.engine = folders, None, None

    def get(self, case: str, **options):
        from references import ready
        from serving_cases import CASES
        from vllm import LLM

        key = (case, *sorted(options.items()))
        if key != self.key:
            self.close()
            if case in CASES:
                ready(self.folders / case)
            fixed = {"max_model_len": 1024, "enforce_eager": True, "enable_prefix_caching": False, "seed": 0}
            fixed |= {"dtype": "float32", "skip_tokenizer_init": True, "disable_log_stats": False}
            fixed |= {"max_num_batched_tokens": 2048, "max_num_seqs": 16}  # an engine starts with a batch of this size
            fixed |= ON_A_GPU if ON_GPU else {}
            # a new engine reads the attributes of all modules, and fails at this one, which the draft tokens of an
            # earlier engine have loaded by way of numba
            sys.modules.pop("llvmlite.binding.ffi", None)
            self.engine = LLM(str(self.folders / case), **(fixed | options))
            self.key = key
        return self.engine

    def close(self):
        if self.engine is not None:
            from vllm.distributed import cleanup_dist_env_and_memory

            with unittest.mock.patch.object(gc, "collect"):
                self.engine.llm_engine.engine_core.shutdown()
            self.engine = self.key = None
            cleanup_dist_env_and_memory()
            gc.freeze()


@pytest.fixture(scope="session")
def engines(folders):
    made = Engines(folders)
    yield made
    made.close()
