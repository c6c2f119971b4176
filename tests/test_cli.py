"""The command line end to end on a tiny teacher, and what a user's mistakes look like."""

import json

import pytest

from cli_runner import SMALL, memmix, result_of
from hf_memmix.conversion import convert_model
from hf_memmix.mixer_names import DEFAULT_MIXER
from tiny_teachers import tiny_teacher, tiny_text, tiny_tokenizer


@pytest.fixture
def workspace(tmp_path):
    tiny_teacher("llama", layers=2).save_pretrained(tmp_path / "teacher")
    tiny_tokenizer().save_pretrained(tmp_path / "teacher")
    (tmp_path / "text.txt").write_text(tiny_text(800))
    return tmp_path


def test_from_teacher_to_generated_text(workspace):
    at = {name: workspace / name for name in ("teacher", "s0", "s1", "s2", "text.txt")}
    run = memmix("convert", "--teacher", at["teacher"], "--out", at["s0"], "--keep-layers", "1", "--json",
                 "--mixer", "gka", "--option", "solver_phases=[21]")  # fmt: skip
    assert result_of(run)["kept"] == [1]
    assert json.loads((at["s0"] / "config.json").read_text())["mixers"]["gka"]["solver_phases"] == [21]
    pair = ["--teacher", at["teacher"], "--text", at["text.txt"], "--json"]
    aligned = result_of(memmix("align", "--student", at["s0"], "--out", at["s1"], *pair, *SMALL))
    assert aligned["steps"] == 3 and aligned["last_loss"] < aligned["first_loss"]
    distilled = result_of(memmix("distill", "--student", at["s1"], "--out", at["s2"], *pair, *SMALL))
    assert distilled["stage"] == "distill"
    report = result_of(memmix("report", "--student", at["s2"], *pair, "--block-size", "32", "--max-tokens", "200"))
    assert report["ppl_ratio"] == pytest.approx(report["student_ppl"] / report["teacher_ppl"])
    assert list(report["layer_error"]) == ["0"]
    assert {"teacher_ppl", "student_ppl", "top1_agreement"} <= report.keys()

    run = memmix("generate", "--model", at["s2"], "--prompt", "the cat", "--max-new-tokens", "5", "--temperature", "0")
    assert run.exit_code == 0 and run.stdout.startswith("the cat") and len(run.stdout.split()) > 2
    run = memmix("generate", "--model", at["s2"], "--prompt", "the cat", "--max-new-tokens", "5", "--json")
    assert 1 <= result_of(run)["new_tokens"] <= 5
    assert sorted(p.name for p in workspace.iterdir()) == ["s0", "s1", "s2", "teacher", "text.txt"]


@pytest.mark.product  # a whole command; its parts have tests
def test_slices_are_merged_and_distilled_from_a_cache(workspace):
    """Two runs of align on different layers, their merge, and a distillation from the teacher's cache."""
    at = {name: workspace / name for name in ("teacher", "s0", "a", "b", "merged", "cache", "done", "text.txt")}
    pair = ["--teacher", at["teacher"], "--text", at["text.txt"], "--json"]
    assert memmix("convert", "--teacher", at["teacher"], "--out", at["s0"], "--mixer", "gka").exit_code == 0
    for name, layers in (("a", "0"), ("b", "1")):
        result_of(memmix("align", "--student", at["s0"], "--out", at[name], "--layers", layers, *pair, *SMALL))
    merged = result_of(memmix("merge", at["a"], at["b"], "--student", at["s0"], "--out", at["merged"], "--json"))
    assert merged["layers"] == {"0": str(at["a"]), "1": str(at["b"])}
    cache = result_of(memmix("cache-teacher", "--out", at["cache"], *pair, "--block-size", "16", "--top-k", "8"))
    assert cache["k"] == 8 and cache["rows"] > 10
    recipe = workspace / "recipe.yaml"
    recipe.write_text(f"stage: distill\nteacher: cache:{at['cache']}\n")
    run = ["distill", "--student", at["merged"], "--out", at["done"], "--recipe", recipe, *pair, *SMALL]
    assert result_of(memmix(*run))["steps"] == 3
    (at["teacher"] / "model.safetensors").write_bytes((at["done"] / "model.safetensors").read_bytes())
    again = memmix(*run, "--overwrite")
    assert again.exit_code == 1 and "with another teacher" in again.stderr


def test_tables_for_people(workspace):
    run = memmix("convert", "--teacher", workspace / "teacher", "--out", workspace / "s")
    assert run.exit_code == 0 and "bit-equal" in run.stdout and "q_proj" in run.stdout
    run = memmix("report", "--student", workspace / "s", "--teacher", workspace / "teacher",
                 "--text", workspace / "text.txt", "--max-tokens", "100")  # fmt: skip
    assert run.exit_code == 0 and "ppl_ratio" in run.stdout


def test_mistakes_are_one_clear_line(workspace):
    """test_cli_start.py has those that are found before torch is imported."""
    convert = ["convert", "--teacher", workspace / "teacher", "--out", workspace / "s"]
    select = ["select", "--teacher", workspace / "teacher", "--out", workspace / "s"]
    pair = ["--student", workspace / "teacher", "--teacher", workspace / "teacher", "--text", workspace / "text.txt"]
    for command, message in (
        ([*convert, "--option", "window=0"], "window=0"),
        (["convert", "--teacher", workspace / "text.txt", *convert[3:]], "it is a file"),
        ([*convert, "--layers", "ska=0 gka=1", "--option", "rank=4"], "rank is an option of one mixer"),
        (["report", *pair], "convert it"),
        ([*select, "--mixer", "gka", "--keep-count", "2"], "keep is 2"),
        ([*select, "--keep-layers", "0-1"], "keeps all 2 layers"),
        ([*select, "--mixers", "gka,ska", "--train-text", workspace / "text.txt", "--keep-count", "2"], "keeps all 2"),
    ):
        run = memmix(*command)
        last = run.output.splitlines()[-1]
        assert run.exit_code == 1 and last.startswith("error:") and message in last and "Traceback" not in run.output
    assert not (workspace / "s").exists()


def test_truncated_weights_are_one_clear_line(workspace):
    file = workspace / "teacher" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    run = memmix("convert", "--teacher", workspace / "teacher", "--out", workspace / "s")
    assert run.exit_code == 1 and run.output.splitlines()[-1].startswith("error:") and "truncated" in run.output


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", '{"model_type": "llama", "hidden_size": 30}', "impossible values"),
        ("config.json", '{"model_type": "deepseek_v3"}', "latent attention"),
        ("config.json", "{", "is not JSON"),
        ("tokenizer.json", '{"version": "1.0", ', "tokenizer that cannot be read"),
    ],
)
def test_broken_folders_are_one_clear_line(workspace, file, content, message):
    (workspace / "teacher" / file).write_text(content)
    run = memmix("convert", "--teacher", workspace / "teacher", "--out", workspace / "s")
    assert run.exit_code == 1 and "Traceback" not in run.output
    assert "error:" in run.output and message in run.output and not (workspace / "s").exists()


def test_numbers_that_yaml_reads_as_text(workspace):
    result_of(memmix("convert", "--teacher", workspace / "teacher", "--out", workspace / "s", "--json",
                     "--mixer", "gka", "--option", "ridge=1e-2"))  # fmt: skip
    assert json.loads((workspace / "s" / "config.json").read_text())["mixers"]["gka"]["ridge"] == 0.01


def test_a_window_of_the_whole_context_is_told(workspace):
    context = json.loads((workspace / "teacher" / "config.json").read_text())["max_position_embeddings"]
    command = ["convert", "--teacher", workspace / "teacher", "--dry-run", "--json", "--option"]
    for window, told in ((context, 1), (context - 1, 0)):
        for option in (f"window.window={window}", f"gka.local_window={window}"):
            run = memmix(*command, option, "--mixer", option.partition(".")[0])
            result_of(run)
            lines = [line for line in run.stderr.splitlines() if "not shorter" in line]
            start = f"warning: {option} is not shorter than the {context} tokens"
            assert len(lines) == told and all(line.startswith(start) for line in lines), run.stderr
    with pytest.warns(UserWarning, match=f"window.window={context} is not shorter"):
        convert_model(workspace / "teacher", window=context)


def test_a_trained_student_with_wrong_mixer_types_is_one_clear_line(workspace):
    base = ["convert", "--teacher", workspace / "teacher"]
    result_of(memmix(*base, "--out", workspace / "student", "--json"))
    file = workspace / "student" / "config.json"
    config = json.loads(file.read_text())
    for wrong in (5, [["gka"], 1], {"a": 1}):
        file.write_text(json.dumps(config | {"mixer_types": wrong}))
        run = memmix(*base, "--trained", workspace / "student", "--out", workspace / "s")
        assert run.exit_code == 1 and "Traceback" not in run.output and "mixer_types" in run.output
        assert not (workspace / "s").exists()


def test_wrong_options_are_usage_errors():
    assert memmix("convert").exit_code == 2
    assert memmix("nosuch").exit_code == 2


def test_an_option_given_twice_is_a_warning(workspace):
    """`--keep-layers 0 --keep-layers 1` keeps layer 1 alone."""
    run = memmix("convert", "--teacher", workspace / "teacher", "--out", workspace / "s",
                 "--keep-layers", "0", "--keep-layers", "1", "--json")  # fmt: skip
    result_of(run)
    assert "warning: --keep-layers is given 2 times; only the last value counts: 1" in run.stderr
    assert json.loads((workspace / "s" / "config.json").read_text())["mixer_types"] == [DEFAULT_MIXER, "attention"]


def test_switches_and_repeatable_options_may_be_given_twice(workspace):
    command = ["convert", "--teacher", workspace / "teacher", "--out", workspace / "s", "--json", "--json"]
    run = memmix(*command, "--option", "window=8", "--option", "sinks=0")
    result_of(run)
    assert "warning" not in run.stderr
    options = json.loads((workspace / "s" / "config.json").read_text())["mixers"][DEFAULT_MIXER]
    assert (options["window"], options["sinks"]) == (8, 0)
