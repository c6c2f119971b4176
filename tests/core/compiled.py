"""Helpers of the tests of torch.compile: counted graphs, generation with a compiled static cache, bounds."""

import torch
from torch._dynamo import lookup_backend
from transformers import CompileConfig

from core.checks import greedy
from testing import float32_noise, random_ids

# A tiny model has about twelve parts in a row that transformers computes in float32: norms, rotary angles, the logits
# of generate(). Their roundings are independent, so all together change an output by sqrt(12) times the change by one.
ROUNDINGS = 4


class Graphs(list):
    """A list of the graphs that a compiler backend received. The backend is a function, because generate() copies its
    options, but not functions.
    """

    def backend(self, then=None):
        """The backend, a function. `then`: name of a backend that compiles the graphs, e.g. "aot_eager"; None: they
        run without compilation.
        """

        def compile_graph(graph, inputs):
            self.append(graph)
            return graph.forward if then is None else lookup_backend(then)(graph, inputs)

        return compile_graph


def compiled_generation(model, ids, backend, **kwargs):
    config = CompileConfig(backend=backend, mode=None, fullgraph=True, dynamic=False)
    config._compile_all_devices = True
    return greedy(model, ids, cache_implementation="static", compile_config=config, **kwargs)


@torch.no_grad()
def bound_of_logits(model, length=15):
    """Bound of the relative difference of the model's logits by float32 roundings in transformers."""
    embeddings = model.get_input_embeddings()(random_ids(2, length))
    return ROUNDINGS * max(float32_noise(lambda e: [model(inputs_embeds=e, use_cache=False).logits], embeddings))
