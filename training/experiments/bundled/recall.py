"""How the recall of the bundled models is measured.

The words of the probes are those of the text that is measured. Every fourth of them is unseen: it stands in no drill
of pairs, passwords or chains. The other ones may stand in drills, but the probes draw other pairs.
"""

from hf_memmix.training.drills import unseen_of
from hf_memmix.training.evaluation.probes import Material, by_length, run_probes
from hf_memmix.training.evaluation.probes.grid import LENGTHS

TASKS = ("niah", "mqar", "kv", "variables")


def measure_recall(models: dict, tokenizer, text: str, context: int, samples: int = 16) -> dict:
    """Exact answers of models by task and length, for all words of the probes about `text` and for the unseen ones.

    models: by name. Returns `{"words": rows, "unseen": rows}`; a row is `{"task", "length", "answers"}` and the share
    of every model by its name.
    """
    material, result = Material(tokenizer, text), {}
    lengths = tuple(length for length in LENGTHS if length <= context) or (context,)
    for name, words in (("words", material), ("unseen", unseen_of(material))):
        options = {"tasks": TASKS, "lengths": lengths, "samples": samples, "control": False}
        result[name] = by_length(run_probes(models, words, **options))
    return result
