"""The variants of Lattice that the ablation trains."""

# rung: options, perplexity in Table 4
LADDER = {
    "delta rule": ({"variant": "delta"}, 11.62),
    "+ orthogonal": ({"variant": "dec", "project": False}, 11.26),
    "+ projection": ({"variant": "dec"}, 10.94),
    "+ forget gate": ({"variant": "dec", "use_forget_gate": True}, 10.94),
    # not in the table: what the gate does without projection
    "delta rule + forget gate": ({"variant": "delta", "use_forget_gate": True}, None),
}
OPEN = {
    "slots 8": {"slots": 8},
    "slots 16": {"slots": 16},
    "slots 32": {"slots": 32},
    "gamma <= 0.25": {"gamma_max": 0.25},
    "gamma <= 0.5": {"gamma_max": 0.5},
    "gamma <= 2": {"gamma_max": 2.0},
    "gamma softplus": {"step_size": "softplus"},
    "gamma constant": {"step_size": "constant"},
}
