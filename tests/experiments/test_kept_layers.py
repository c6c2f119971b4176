"""Plans side by side: what is planned, and what the table says of the chosen, the uniform and all other plans."""

from argparse import Namespace

import pytest

from hf_memmix.training.experiments.common.harness import matches
from hf_memmix.training.experiments.conversion.kept_layers import draw_sets, rows_to_run, run, summary, table


def results_of(costs):
    """Rows of six layers; a set of kept layers has as KL the sum of what its swapped layers cost."""
    layers = [{"layer": i, "kl": cost, "nll": -cost, "rank": 0} for i, cost in enumerate(costs)]
    rows = [{"stage": "align", "ranking": {"layers": layers}}]
    for row in rows_to_run(rows, Namespace(sizes=[1, 2])):
        kl = sum(cost for i, cost in enumerate(costs) if i not in row["keep"])
        rows.append(row | {"trained": {"kl": kl, "ppl_ratio": 1 + kl, "answers": {}}})
    where = {"hardware": "none", "commit": "none"}
    return {"rows": rows, "environment": where, "settings": {"distill_steps": 1}}


def test_every_plan_of_a_size_is_a_row():
    (first,) = rows_to_run([], Namespace(sizes=[1, 2]))
    assert first == {"stage": "align"}
    rows = rows_to_run([first], Namespace(sizes=[1, 2]))
    assert len(rows) == 6 + 15 and not any(matches(first, row) for row in rows)


def test_summary_and_plot(tmp_path):
    results = results_of([1.0, 6.0, 2.0, 3.0, 5.0, 4.0])
    one, two = summary(results)
    assert (one["plans"], two["plans"]) == (6, 15)
    assert one["named"]["KL alone"] == {"keep": [1], "kl": 15.0, "ppl_ratio": 16.0, "answers": {}, "better": 1.0}
    assert two["named"]["KL alone"]["keep"] == [1, 4] and two["kl"]["best"] == two["named"]["KL alone"]["kl"] == 10.0
    assert two["named"]["answers alone"]["keep"] == [0, 2] and two["named"]["answers alone"]["better"] == 0.0
    assert one["named"]["uniform"]["keep"] == [3] and one["kl"]["mean"] == pytest.approx(17.5)
    text = table(results)
    assert "| 1 | KL alone | 1 | 15.0000 | 16.0000 |" in text and "mean of all 15" in text
    draw_sets(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_rows_in_miniature(tmp_path):
    from hf_memmix.assets import asset_path

    args = Namespace(out=tmp_path / "r.json", text=asset_path("train.txt"), mixer="gka", sizes=[1], align_steps=2,
                     distill_steps=2, batch_size=2, block_size=32, measured_tokens=1024, samples=1,
                     deadline=float("inf"))  # fmt: skip
    align = run({"stage": "align"}, args)
    assert len(align["ranking"]["layers"]) == 6
    row = run({"stage": "distill", "keep": [0]}, args)
    assert row["untrained"]["layers"] == [1, 2, 3, 4, 5] and row["trained"]["kl"] > 0
    assert set(row["trained"]["answers"]) == {"niah", "mentions"}
