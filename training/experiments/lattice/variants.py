"""The variants of Lattice that the ablation trains."""

# the name of a variant: its options, and its perplexity in Table 4 of Karami and Mirrokni
IN_PAPER = {
    "delta rule": ({"variant": "delta"}, 11.62),
    "+ orthogonal": ({"variant": "dec", "project": False}, 11.26),
    "+ projection": ({"variant": "dec"}, 10.94),
    "+ forget gate": ({"variant": "dec", "use_forget_gate": True}, 10.94),
    # Table 4 does not have this variant; it shows what the forget gate does without projection
    "delta rule + forget gate": ({"variant": "delta", "use_forget_gate": True}, None),
}
# the name of a variant that the paper does not measure: its options
NOT_IN_PAPER = {
    "slots 8": {"slots": 8},
    "slots 16": {"slots": 16},
    "slots 32": {"slots": 32},
    "gamma <= 0.25": {"gamma_max": 0.25},
    "gamma <= 0.5": {"gamma_max": 0.5},
    "gamma <= 2": {"gamma_max": 2.0},
    "gamma softplus": {"step_size": "softplus"},
    "gamma constant": {"step_size": "constant"},
}
