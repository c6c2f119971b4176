"""What became of the predictions about students that keep some attention layers (26 to 31 in the README)."""

from hf_memmix.training.experiments.common.predictions import Found
from hf_memmix.training.experiments.recall_teacher.probing import GATE_LENGTH, PROBES
from hf_memmix.training.experiments.recall_teacher.student_figures import (
    MIXERS,
    THREE_PROBES,
    WINDOWS,
    Students,
    mean_of_probes,
    percent,
)


def _six_selected(students: Students, raised) -> list[Found]:
    found = []
    for name in MIXERS:
        ours, theirs = (students.mean("heldout_kl", name, 6, how) for how in ("select", "uniform"))
        if None not in (ours, theirs):
            found.append((f"KL: {name} {ours:.3f} against {theirs:.3f}", ours < theirs))
    for name in ("gka", "gla", "lattice", "mamba2"):
        ours, theirs = (mean_of_probes(students, name, 6, how) for how in ("select", "uniform"))
        if None not in (ours, theirs):
            found.append((f"recall: {name} {ours:.0f} against {theirs:.0f}", ours >= theirs))
    return found


def _three_selected(students: Students, raised) -> list[Found]:
    found = []
    for name in MIXERS:
        for task in THREE_PROBES:
            ours, theirs = students.share(task, name, 3, "select"), students.share(task)
            if (name == "ska" and task != "variables") or ours is None or not theirs:
                continue
            ratio = 100 * ours / theirs
            right = ratio < 95 if task == "variables" else ratio >= 95
            found.append((f"{PROBES[task][2]}: {name} {ratio:.0f} %", right))
    return found


def _one_selected(students: Students, raised) -> list[Found]:
    found, longest = [], 2 * GATE_LENGTH
    for task in ("niah", "mqar_32"):
        if (share := students.share(task, "coffee", 1, "select")) is not None:
            found.append((f"{PROBES[task][2]}: coffee {share:.0f}", share >= 90))
    for name in ("gla", "mamba2"):
        both = [students.share("niah", name, 1, how, length=longest) for how in ("select", "uniform")]
        if None not in both:
            text = f"needle at {longest}: {name} {both[0]:.0f} by `select`, {both[1]:.0f} in the middle"
            found.append((text, both[0] - both[1] >= 10))
    return found


def _ska_layers(students: Students, raised) -> list[Found]:
    limits = {(1, "uniform"): (0, 10), (6, "uniform"): (90, 100), (6, "select"): (90, 100)}
    found = []
    for (keep, how), (low, high) in limits.items():
        if (share := students.share("niah", "ska", keep, how)) is not None:
            found.append((f"{keep} {how} {share:.0f}", low <= share <= high))
    return found


def _window_layers(students: Students, raised) -> list[Found]:
    found, gka = [], students.mean("heldout_kl", "gka", 6)
    for name in WINDOWS:
        if None not in (ours := students.mean("heldout_kl", name, 6), gka):
            found.append((f"6 layers: {name} {ours:.3f}, gka {gka:.3f}", ours < gka))
    wide, narrow = (students.mean("heldout_kl", name, 1) for name in reversed(WINDOWS))
    if None not in (wide, narrow):
        found.append((f"1 layer: {wide:.3f} against {narrow:.3f}", wide < narrow))
    return found


def _seeds_of_hybrids(students: Students, raised) -> list[Found]:
    """The largest differences of two seeds, each with its student."""
    by_kl, by_hops = {}, {}
    for (keep, how, name), rows in students.rows.items():
        if keep == 0 or len(rows) < 2:
            continue
        kl = [row["heldout_kl"] for row in rows]
        hops = [percent([row["recall"]], "variables") for row in rows]
        by_kl[name, keep, how] = 100 * (max(kl) / min(kl) - 1)
        by_hops[name, keep, how] = max(hops) - min(hops)
    if not by_kl:
        return []
    found = []
    for title, by, unit, most in (("KL", by_kl, " %", 5), ("two hops", by_hops, " points", 15)):
        worst = max(by, key=by.get)
        within = sum(value <= most for value in by.values())
        text = f"{title}: {within} of {len(by)} within; {worst[0]} with {worst[1]} ({worst[2]}) {by[worst]:.0f}{unit}"
        found.append((text, within == len(by)))
    return found


HYBRIDS = {
    "26": (
        "6 layers by `select`: a lower KL than 6 uniform ones; GKA, GLA, Lattice and Mamba-2: at least the same mean"
        " recall",
        _six_selected,
    ),
    "27": (
        "3 layers by `select`: at least 95 % of the teacher's needle and MQAR with 32 pairs but for SKA, less of two"
        " hops",
        _three_selected,
    ),
    "28": (
        "1 layer by `select`: COFFEE at least 90 % of needle and MQAR with 32 pairs; at 2048 tokens GLA and Mamba-2 at"
        " least 10 points more needles than with the layer in the middle",
        _one_selected,
    ),
    "29": ("SKA, needle: with 1 uniform layer at most 10 %, with 6 at least 90", _ska_layers),
    "30": (
        "KL: windows with 6 kept layers below GKA; with 1, the window of 256 tokens below that of 64",
        _window_layers,
    ),
    "31": (
        "kept layers: two seeds differ by at most 5 % in KL and 15 points of two hops (the largest is shown)",
        _seeds_of_hybrids,
    ),
}
