"""COFFEE's experiments: the tasks are what they say, baselines obey their recurrences, training and files work."""

import gzip
import json
import sys

import pytest
import torch
import torch.nn.functional as F
import typer

from hf_memmix.models.coffee_core import CoffeeCore
from hf_memmix.training.experiments.coffee import glyphs as coffee_glyphs
from hf_memmix.training.experiments.coffee import ih0 as coffee_ih0
from hf_memmix.training.experiments.coffee import images as coffee_images
from hf_memmix.training.experiments.coffee import plots as coffee_plots
from hf_memmix.training.experiments.coffee import report as coffee_report
from hf_memmix.training.experiments.coffee import tables as coffee_tables
from hf_memmix.training.experiments.coffee import trainer as coffee_trainer
from hf_memmix.training.experiments.coffee.baselines import S6Layer, TokenGateCore
from hf_memmix.training.experiments.coffee.tasks import LAST_SYMBOL, SYMBOLS, InductionHead
from hf_memmix.training.experiments.coffee.trainer import Run, train
from hf_memmix.training.experiments.common.idx import read_idx


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    "sizes", [{}, {"gap": 2}, {"target": 2}, {"trigger": 2}, {"length": 40}, {"length": 4}, {"trigger": 2, "gap": 1}]
)
def test_sequences_are_as_described(sizes):
    task = InductionHead(**sizes)
    ids, target = task.draw(2, 3000, generator())
    length, n = task.length, task.trigger
    assert ids.shape == (2, 3000, length + task.target - 1) and target.shape == (2, 3000, task.target)
    assert (ids[..., length:] == 0).all() and (ids[..., :length] >= 1).all() and (ids <= LAST_SYMBOL).all()
    assert (task.triggers(ids) == 2).all()
    trigger = torch.arange(1, n + 1)
    assert (ids[..., length - n : length] == trigger).all()
    windows = (ids.unfold(2, n, 1) == trigger).all(-1)
    first = windows.int().argmax(-1, keepdim=True)
    here = first + n + task.gap + torch.arange(task.target)
    assert torch.equal(ids.gather(2, here), target)
    counts = torch.bincount(first.flatten(), minlength=task.places)
    assert len(counts) == task.places and counts.min() > 0.5 * counts.float().mean()
    symbols = LAST_SYMBOL if n == 2 else LAST_SYMBOL - 1
    assert len(target.unique()) == symbols
    assert not torch.equal(ids[0], ids[1])


def test_too_short_sequences_are_refused():
    with pytest.raises(ValueError, match="length=5 is too short: it must be at least 6"):
        InductionHead(length=5, trigger=2, gap=1)
    with pytest.raises(ValueError, match="trigger=3"):
        InductionHead(trigger=3)


def test_s6_is_its_recurrence():
    torch.manual_seed(0)
    layer, u = S6Layer(dim=3, states=2, copies=2).double(), torch.randn(4, 6, 6, dtype=torch.float64)
    with torch.no_grad():
        layer.A_log.normal_()
    for s in range(2):
        A, x = -layer.A_log[s].exp(), torch.zeros(4, 3, 2, dtype=torch.float64)
        outputs = []
        for k in range(6):
            token = u[:, k, 3 * s : 3 * s + 3]
            step = F.softplus(token @ layer.W_D[s].T)[..., None]
            B, C = token @ layer.W_B[s].T, token @ layer.W_C[s].T
            kept = torch.exp(A * step)
            x = kept * x + (kept - 1) / A * B[:, None] * token[..., None]
            outputs.append((C[:, None] * x).sum(-1))
        expected = torch.stack(outputs, 1)
        torch.testing.assert_close(layer(u, 6)[..., 3 * s : 3 * s + 3], expected)
        torch.testing.assert_close(layer(u, 2)[..., 3 * s : 3 * s + 3], expected[:, -2:])


def test_token_gate_is_equation_4():
    torch.manual_seed(0)
    model = TokenGateCore(symbols=9, dim=3, states=2).double()
    with torch.no_grad():
        model.lam.uniform_(-1, 0)
    u, x = torch.randn(4, 5, 3, dtype=torch.float64), torch.zeros(4, 3, 2, dtype=torch.float64)
    for k in range(5):
        step = torch.sigmoid(u[:, k] @ model.W_D[0].T)[..., None]
        x = (1 + model.lam[0] * step) * x + step * model.B[0] * u[:, k, :, None]
    torch.testing.assert_close(model.mix(u, 1)[:, 0], (model.C[0] * x).sum(-1))


def test_every_row_has_the_papers_parameters():
    expected = {1: [512, 784, 528, 512, 512, 512], 2: [96, 48, 24, 12], 3: [512] * 2, 4: [512] * 2, 5: [512] * 4}
    expected[6] = [784, 784, 512, 512, 512]
    for table, counts in expected.items():
        runs = [coffee_tables.make_run({**row, "seeds": 1}, 0) for row in coffee_tables.settings(table)]
        assert [sum(p.numel() for p in run.model.parameters()) for run in runs] == counts
        assert len({run.name for run in runs}) == len(runs)


def short_run(name="a", **fields):
    row = {**coffee_tables.settings(1)[0], "seeds": 2, "task": {"length": 5}}
    run = coffee_tables.make_run(row, 0, epoch=40, batch=64)
    run.name, run.test = name, lambda g: [run.draw(500, g)]
    vars(run).update({"iterations": 40, "evaluate_every": 20, **fields})
    return run


def test_training_learns_is_seeded_and_leaves_the_others_alone():
    """A short task is learned in part; the same seed gives the same curve; a run that fails is reported."""

    def broken(batch, generator):
        raise RuntimeError("no data")

    quiet = {"device": torch.device("cpu"), "report": lambda line: None}
    found = train([short_run(iterations=400), short_run("b", draw=broken)], **quiet)
    assert found["b"]["error"] == "RuntimeError: no data"
    curve = found["a"]["curve"]
    assert [row["iteration"] for row in curve] == list(range(20, 401, 20))
    assert min(curve[-1]["accuracy"]) > 0.5 > 0.3 > max(curve[0]["accuracy"]) - 0.2
    assert found["a"]["parameters"] == 512
    again = train([short_run(iterations=400)], **quiet)["a"]
    assert again["curve"] == curve


def test_a_seed_trains_as_it_does_alone():
    """Two seeds at a time and the second one alone, on the same sequences: the parameters after 20 steps agree."""
    batches = [InductionHead().draw(2, 64, generator(step)) for step in range(20)]

    def trained(kept):
        run = short_run()
        few = CoffeeCore(SYMBOLS, run.model.dim, run.model.lam.shape[2], copies=len(kept), fixed=run.model.fixed)
        few.load_state_dict({name: value[kept] for name, value in run.model.state_dict().items()})
        run.model = few
        run.prepare(torch.device("cpu"))
        for ids, target in batches:
            run.draw = lambda batch, of, ids=ids, target=target: ((ids[kept], 1), target[kept])
            run.step()
        return torch.cat([p[-1].flatten() for p in run.model.parameters()])

    torch.testing.assert_close(trained([1]), trained([0, 1]), rtol=1e-3, atol=1e-4)


def test_a_time_limit_still_gives_results():
    found = train([short_run(iterations=10**9)], torch.device("cpu"), seconds=1.0, report=lambda line: None)["a"]
    assert 0 < found["iterations"] < 10**9 and found["last"]["iteration"] == found["iterations"]


def flat(run):
    return torch.cat([p.detach().flatten().cpu() for p in run.model.parameters()])


def test_a_training_goes_on_from_its_checkpoint(tmp_path):
    """Up to the rounding of Adam's moments; a finished training is only read, that of another run is refused."""
    quiet = {"device": torch.device("cpu"), "report": lambda line: None}
    file, without_break = tmp_path / "folder" / "a.pt", short_run()
    expected = train([without_break], **quiet)["a"]
    train([short_run(iterations=20, checkpoint=file)], **quiet)
    resumed = short_run(checkpoint=file)
    found = train([resumed], **quiet)["a"]
    assert [row["iteration"] for row in found["curve"]] == [20, 40] and found["curve"][0] == expected["curve"][0]
    torch.testing.assert_close(flat(resumed), flat(without_break), rtol=0, atol=0.01)
    again = short_run(checkpoint=file)
    again.draw = None
    assert train([again], **quiet)["a"]["curve"] == found["curve"]
    refused = train([short_run(checkpoint=file, batch=32)], **quiet)["a"]["error"]
    assert "with batch = 64, and here batch = 32" in refused


class Event:
    """The end of a slice: has it been reached?"""

    def __init__(self, reached):
        self.query = lambda: reached


def test_a_fast_run_does_not_wait_for_a_slow_one():
    slow, fast, lines = short_run(), short_run("b"), []
    prepare = slow.prepare

    def prepare_with_waiting_slices(device):
        prepare(device)
        slow.slices = [Event(False), Event(False)]

    slow.prepare = prepare_with_waiting_slices
    found = train([slow, fast], torch.device("cpu"), seconds=2.0, report=lines.append)
    assert slow.done == 0 and found["b"]["iterations"] == 40 and len(lines) == 2
    slow.slices = [Event(True), Event(False)]
    assert slow.ready and len(slow.slices) == 1
    slow.done = 20  # an evaluation waits for all steps
    assert slow.due and not slow.ready


@pytest.mark.gpu
def test_ten_steps_in_one_graph_are_ten_steps_and_a_checkpoint_goes_on(tmp_path, monkeypatch):
    quiet = {"device": torch.device("cuda"), "report": lambda line: None}
    together = short_run()
    train([together], **quiet)
    file = tmp_path / "a.pt"
    train([short_run(iterations=20, checkpoint=file)], **quiet)
    resumed = short_run(checkpoint=file)
    train([resumed], **quiet)
    assert together.per_launch == resumed.per_launch == 10
    monkeypatch.setattr(coffee_trainer, "STEPS_PER_GRAPH", 1)
    alone = short_run()
    train([alone], **quiet)
    assert alone.per_launch == 1
    torch.testing.assert_close(flat(together), flat(alone), rtol=0, atol=1e-3)
    torch.testing.assert_close(flat(resumed), flat(alone), rtol=0, atol=0.01)


def test_ih0_is_solved_and_the_papers_embeddings_end_where_its_figure_does(tmp_path):
    learned = coffee_ih0.describe(coffee_ih0.learn())
    assert learned["right"] == 8 > coffee_ih0.describe(coffee_ih0.model_with(coffee_ih0.START))["right"]
    torch.testing.assert_close(
        torch.tensor(learned["embeddings"]), torch.tensor(coffee_ih0.PAPER["embeddings"]), rtol=0, atol=0.5
    )
    theirs = coffee_ih0.describe(coffee_ih0.model_with(coffee_ih0.PAPER["embeddings"]))
    for sequence, state in coffee_ih0.PAPER["last_states"].items():
        torch.testing.assert_close(
            torch.tensor(theirs["states"][sequence][-1]), torch.tensor(state), rtol=0, atol=0.03
        )
    plot = tmp_path / "ih0.png"
    coffee_plots.plot_ih0({"learned": learned, "with_the_papers_embeddings": theirs}, plot)
    assert plot.stat().st_size > 10_000


def test_tables_command_and_plot(tmp_path, monkeypatch):
    out, plot = tmp_path / "tables.json", tmp_path / "tables.png"
    monkeypatch.setattr(coffee_tables, "TEST_CHUNKS", 1)
    further = tmp_path / "further.json"
    coffee_tables.main(tmp_path / "fixed.json", tables=[3], seeds=1, seconds=0.1, fixed=8, further_seeds=further)
    assert json.loads(further.read_text())["seed"] == 1
    assert {run["table"] for run in json.loads(further.read_text())["runs"].values()} == {2}
    fixed = json.loads((tmp_path / "fixed.json").read_text())["runs"]
    assert [run["fixed"] for run in fixed.values()] == [8, 8] and all("fixed=8" in name for name in fixed)
    coffee_tables.main(out, tables=[2], seeds=1, seconds=0.5)
    report = json.loads(out.read_text())
    assert len(report["runs"]) == 4 and not [run for run in report["runs"].values() if "error" in run]
    found = next(iter(report["runs"].values()))
    model, (ids, target) = coffee_tables.restore(found), InductionHead().draw(1, 2500, generator(1))
    accuracy = (model(ids, last=1).argmax(-1) == target).float().mean().item()
    assert (
        abs(accuracy - max(found["last"]["accuracy"])) < 0.05
    )  # the same sequences but for their place in the stream
    assert "0.99" in coffee_report.report([report])
    coffee_plots.plot_tables([report], plot)
    assert plot.stat().st_size > 10_000


def test_rows_of_two_files_are_trained_together_and_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(coffee_tables, "TEST_CHUNKS", 1)
    rows = [{**coffee_tables.settings(table)[0], "seeds": 1} for table in (2, 3)]
    files = [coffee_tables.Results(tmp_path / f"{seed}.json", [row], seed) for seed, row in enumerate(rows)]
    with pytest.raises(typer.BadParameter, match="the file of the other rows"):
        coffee_tables.main(tmp_path / "a.json", tables=[3], further_seeds=tmp_path / "a.json")
    reached = []
    for _ in range(2):
        coffee_tables.run_rows(files, seconds=0.5, checkpoints=tmp_path / "saved", report=lambda line: None)
        reports = [json.loads(file.out.read_text()) for file in files]
        assert [(report["seed"], len(report["runs"])) for report in reports] == [(0, 1), (1, 1)]
        reached.append([run["iterations"] for report in reports for run in report["runs"].values()])
    assert all(0 < first < second for first, second in zip(*reached, strict=True))
    assert len(list((tmp_path / "saved").iterdir())) == 2


def test_glyphs_are_seeded_and_labelled():
    images, labels, test_images, test_labels = coffee_glyphs.glyphs(1500, 500)
    assert images.shape == (1500, 25, 25) and test_images.shape == (500, 25, 25)
    assert images.min() >= 0 and images.max() <= 1 and len(labels.unique()) == 10
    assert torch.equal(images, coffee_glyphs.glyphs(1500, 500)[0])
    # a nearest class mean is far above chance, and far from right: labels fit, and digits vary
    means = torch.stack([images[labels == c].mean(0) for c in range(10)]).flatten(1)
    accuracy = (torch.cdist(test_images.flatten(1), means).argmin(1) == test_labels).float().mean()
    assert 0.4 < accuracy < 0.9


def idx(path, array):
    header = b"\0\0\x08" + bytes([array.dim()]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    data = header + array.numpy().tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def test_mnist_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="train-images-idx3-ubyte"):
        coffee_glyphs.mnist(tmp_path)
    images = torch.randint(256, (6, 28, 28), dtype=torch.uint8)
    for part, end in (("train", ""), ("t10k", ".gz")):
        idx(tmp_path / f"{part}-images-idx3-ubyte{end}", images)
        idx(tmp_path / f"{part}-labels-idx1-ubyte{end}", torch.arange(6, dtype=torch.uint8))
    train_images, labels, test_images, _ = coffee_glyphs.mnist(tmp_path)
    assert torch.equal(train_images, images[:, 1:26, 1:26] / 255) and torch.equal(train_images, test_images)
    assert labels.tolist() == list(range(6))
    idx(tmp_path / "train-labels-idx1-ubyte", torch.arange(5, dtype=torch.uint8))
    with pytest.raises(ValueError, match="train has images"):
        coffee_glyphs.mnist(tmp_path)
    (tmp_path / "x").write_bytes(b"\0\0\x08\1\0\0\0\5abc")
    with pytest.raises(ValueError, match=r"has 11 bytes.*8 \+ 5"):
        read_idx(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"PK..")
    with pytest.raises(ValueError, match="starts with 504b"):
        read_idx(tmp_path / "x")


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="pip install scikit-learn"):
        coffee_glyphs.digits()


def test_four_directions():
    """Turning the image over exchanges two directions; the paper's parameter counts."""
    counts = {"coffee": 3385, "coffee with output filter": 3585, "S6": 5885}
    for name, count in counts.items():
        torch.manual_seed(0)
        model = coffee_images.FourDirections(name, 25, 2, copies=2)
        assert sum(p.numel() for p in model.parameters()) == 2 * count
    model = coffee_images.FourDirections("coffee", 5, 2, copies=1).double()
    seen = []
    honest = model.layers.forward
    model.layers.forward = lambda u, last: seen.append(u) or honest(u, last)
    image = torch.randn(1, 1, 5, 5, dtype=torch.float64)
    model(image)
    rows, columns, up, left = seen[0][0].unflatten(1, (4, 5)).unbind(1)
    assert torch.equal(rows, image[0, 0]) and torch.equal(columns, image[0, 0].T)
    assert torch.equal(up, rows.flip(0)) and torch.equal(left, columns.flip(0))


def test_augmentation_is_small():
    images = coffee_glyphs.glyphs(20, 0)[0]
    moved = coffee_images.roto_translated(images, generator())
    assert moved.shape == images.shape and not torch.equal(moved, images)
    assert (moved - images).abs().mean() < 0.5 * images.abs().mean()
    inside = images.new_zeros(1, 25, 25)
    inside[:, 12, 12] = 1
    assert coffee_images.roto_translated(inside, generator())[0, 11:14, 11:14].sum() > 0.9


def test_classifier_learns():
    run = coffee_images.make_run("coffee", 2, coffee_glyphs.glyphs(1000, 300), epochs=4, seeds=2, batch=100)
    assert isinstance(run, Run)
    found = train([run], torch.device("cpu"), report=lambda line: None)[run.name]
    assert min(found["last"]["accuracy"]) > 0.4 and found["parameters"] == 3385
