"""The variants of Lattice that the ablation trains, and the paper's language models."""

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

# Karami and Mirrokni, Table 2: perplexity on Books. All its recurrent models have the block of Lattice, so its Mamba-2
# is "linear-decay" here; "mamba2" is Mamba-2 in the block of its own paper
PAPER = {
    "transformer": {512: 20.60, 2048: 18.89, 8192: 18.85},
    "linear": {512: 21.04, 2048: 19.82, 8192: 20.34},
    "linear-decay": {512: 19.94, 2048: 18.34, 8192: 18.23},
    "delta": {512: 20.28, 2048: 18.33, 8192: 18.05},
    "gdn": {512: 19.76, 2048: 18.00, 8192: 17.40},
    "ttt": {512: 20.11, 2048: 18.36, 8192: 18.05},
    "dec": {512: 19.06, 2048: 17.14, 8192: 16.62},
    "enc": {512: 19.11, 2048: 17.22, 8192: 16.66},
    "sim": {512: 19.08, 2048: 17.23, 8192: 16.73},
}
