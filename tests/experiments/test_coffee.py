"""COFFEE's experiments: the tasks are what they say, baselines obey their recurrences, and training works."""

import json

import pytest
import torch
import torch.nn.functional as F

from hf_memmix.models.coffee_core import CoffeeCore
from hf_memmix.training.experiments.coffee import images as coffee_images
from hf_memmix.training.experiments.coffee import tables as coffee_tables
from hf_memmix.training.experiments.coffee import trainer as coffee_trainer
from hf_memmix.training.experiments.coffee.baselines import S6Layer, TokenGateCore
from hf_memmix.training.experiments.coffee.tasks import LAST_SYMBOL, SYMBOLS, InductionHead
from hf_memmix.training.experiments.coffee.trainer import train


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


def test_four_directions():
    """Turning the image over exchanges two directions; the paper's parameter counts."""
    counts = {("coffee", 2): 3385, ("coffee with output filter", 2): 3585, ("S6", 2): 5885, ("S6", 16): 10085}
    for (name, states), count in counts.items():
        model = coffee_images.FourDirections(name, 25, states, copies=2)
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


def test_pixels_are_one_sequence():
    """A classifier of pixels is COFFEE over the 784 pixels, row by row, then GELU and a linear layer for each copy."""
    model = coffee_images.Pixels(4, 2, copies=2).double()
    images = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    for s in range(2):
        x, outputs = torch.zeros(3, 2, dtype=torch.float64), []
        for pixel in images[s].flatten(1).unbind(1):
            gate = torch.sigmoid(model.layer.w[s, 0] * x)
            x = (1 + model.layer.lam[s, 0] * gate) * x + gate * pixel[:, None]
            outputs.append((model.layer.C[s, 0] * x).sum(-1))
        logits = F.gelu(torch.stack(outputs, 1)) @ model.weights[0][s] + model.biases[0][s]
        torch.testing.assert_close(model(images)[s], logits)
    alone = coffee_images.Pixels(4, 0, copies=2).double()
    expected = F.gelu(images.flatten(2)) @ alone.weights[0] + alone.biases[0]
    torch.testing.assert_close(alone(images), expected)


def test_rows_of_two_files_are_trained_together(tmp_path, monkeypatch):
    monkeypatch.setattr(coffee_tables, "TEST_CHUNKS", 1)
    rows = [{**coffee_tables.settings(table)[0], "seeds": 1} for table in (2, 3)]
    files = [coffee_tables.Results(tmp_path / f"{seed}.json", [row], seed) for seed, row in enumerate(rows)]
    coffee_tables.run_rows(files, seconds=0.5, report=lambda line: None)
    reports = [json.loads(file.out.read_text()) for file in files]
    assert [(report["seed"], len(report["runs"])) for report in reports] == [(0, 1), (1, 1)]
    assert all("weights" in run for report in reports for run in report["runs"].values())


@pytest.mark.gpu
def test_ten_steps_in_one_graph_are_ten_steps(monkeypatch):
    runs = []
    for steps in (10, 1):
        monkeypatch.setattr(coffee_trainer, "STEPS_PER_GRAPH", steps)
        runs.append(short_run())
        train(runs[-1:], torch.device("cuda"), report=lambda line: None)
    assert [run.per_launch for run in runs] == [10, 1]
    together, alone = (torch.cat([p.detach().flatten() for p in run.model.parameters()]) for run in runs)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-3)
