"""What runs in processes of its own: the server and its clients, tensor parallelism, vLLM with other models."""

import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from greedy import ask, assert_greedy, references_of, tokens_of
from references import ready
from serving_cases import ASSET, DIVIDED

from tiny_teachers import CHAT

GRACE = 60  # seconds in which the server lets open requests finish
TEXT = "When he came to the city, he"
# prints whether vLLM's tables were changed by the plugin, for a process that has loaded all plugins
PLAIN = """
import sys
from vllm.config.compilation import CompilationConfig
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
before = list(CompilationConfig._attention_ops), dict(MODELS_CONFIG_MAP), list(MambaAttentionBackendEnum)
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm import ModelRegistry
assert "MemMixLlamaForCausalLM" in ModelRegistry.models and "GKAForCausalLM" in ModelRegistry.models
added = MODELS_CONFIG_MAP.keys() - before[1].keys()
assert added and {MODELS_CONFIG_MAP[name].__name__ for name in added} == {"MemMixVerifyAndUpdate"}
assert all(MODELS_CONFIG_MAP[name] is value for name, value in before[1].items())
assert before[0] == CompilationConfig._attention_ops and before[2] == list(MambaAttentionBackendEnum)
loaded = {name for name in sys.modules if name.startswith("hf_memmix.serving.vllm.")}
assert not loaded & {"hf_memmix.serving.vllm." + name for name in ("layer", "model", "metadata")}, loaded
print("untouched")
"""
# a vLLM that is newer than the tested ones: other models load, ours are refused in one line
NEWER = """
import sys
from hf_memmix.serving.vllm import registration
registration.installed_version = lambda: "0.99.0"
from transformers import AutoConfig
from vllm.plugins import load_general_plugins
load_general_plugins()
AutoConfig.from_pretrained(sys.argv[1])
try:
    AutoConfig.from_pretrained(sys.argv[2])
except ValueError as error:
    print(error)
"""


def python(code: str, *arguments) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.strip().splitlines()[-1]


def test_other_models_are_left_alone():
    assert python(PLAIN) == "untouched"


def test_an_untested_version_is_refused():
    from hf_memmix.assets import asset_path

    line = python(NEWER, asset_path("tiny_teacher"), asset_path("tiny_gka"))
    assert line.startswith("vLLM 0.99.0 cannot serve memory mixers: the plugin works with 0.26 to 0.33. pip install")


@pytest.mark.parametrize("case", DIVIDED)
def test_two_ranks(case, engines):
    references = references_of(engines.folders, case, "few")
    engine = engines.get(case, tensor_parallel_size=2, distributed_executor_backend="mp")
    assert_greedy(tokens_of(ask(engine, references)), references)


@contextlib.contextmanager
def started(command: list[str], log: Path):
    """The address of a server that this command of Python starts, and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", *command, "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32"]
    command += ["--enforce-eager", "--served-model-name", "tiny", "--shutdown-timeout", str(GRACE)]
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
    try:
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 300
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        else:
            pytest.fail(log.read_text()[-4000:])
        yield address, process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def ask_server(address: str, path: str, **options) -> dict:
    """The first answer."""
    fields = {"model": "tiny", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{address}/v1/{path}",
        data=json.dumps(fields | options).encode(),
        headers={"Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request, timeout=120))["choices"][0]


def assert_open_requests_end(address: str, process):
    """A request that is open when the server is told to end gets its whole answer, and then the server ends."""
    with concurrent.futures.ThreadPoolExecutor(1) as clients:
        answer = clients.submit(ask_server, address, "completions", prompt=TEXT, max_tokens=400, return_token_ids=True)
        time.sleep(1)
        assert not answer.done()
        process.send_signal(signal.SIGTERM)
        assert len(answer.result()["token_ids"]) == 400
    process.wait(GRACE + 30)
    assert process.returncode == 0


@pytest.mark.cases(ASSET)
def test_server_answers_concurrent_clients(folders, tmp_path):
    """Completions and chats; and those that are open when the server is told to end."""
    references = references_of(folders, ASSET, "plain")
    folder = shutil.copytree(ready(folders / ASSET), tmp_path / ASSET)
    (folder / "chat_template.jinja").write_text(CHAT)
    log = folders / "server.log"
    with started(["hf_memmix_cli", "serve", str(folder)], log) as (address, process):
        assert "states of one sequence, whatever its length: 5 x gka of" in log.read_text()

        def complete(prompt, **options):
            return ask_server(address, "completions", prompt=prompt, **options)

        with concurrent.futures.ThreadPoolExecutor(len(references)) as clients:
            answers = list(clients.map(lambda r: complete(r["prompt"], return_token_ids=True), references))
        assert_greedy([answer["token_ids"] for answer in answers], references)
        answer = complete(TEXT)["text"]
        assert answer.strip()
        echoed = complete(TEXT, echo=True, logprobs=1)
        assert echoed["text"] == TEXT + answer
        assert len(echoed["logprobs"]["token_logprobs"]) > 16 and echoed["logprobs"]["token_logprobs"][0] is None
        first = complete(TEXT, stop=answer.split()[1])
        assert first["finish_reason"] == "stop" and first["text"] == answer[: answer.index(answer.split()[1])]
        chat = ask_server(address, "chat/completions", messages=[{"role": "user", "content": TEXT}])
        assert chat["message"]["content"].strip() and chat["message"]["role"] == "assistant"
        assert_open_requests_end(address, process)
