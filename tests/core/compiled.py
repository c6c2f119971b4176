"""What the tests of torch.compile share: counted graphs, generation with a compiled static cache, bounds."""

import torch
from torch._dynamo import lookup_backend
from transformers import CompileConfig

from core.checks import greedy
from testing import float32_noise, random_ids

# A tiny model has about twelve float32 parts of the library in a row: norms, rotary angles, the logits of generate().
# Their roundings are independent, so together they move an output by the root of twelve times what one does.
ROUNDINGS = 4


class Graphs(list):
    """A backend that keeps the graphs it is given, to count them; generate() copies its options, but no function."""

    def backend(self, then=None):
        """`then`: the name of a backend that compiles the graphs, e.g. "aot_eager"; None: they run as they are."""

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
    """The relative difference that float32 roundings in the library may make in the model's logits."""
    embeddings = model.get_input_embeddings()(random_ids(2, length))
    return ROUNDINGS * max(float32_noise(lambda e: [model(inputs_embeds=e, use_cache=False).logits], embeddings))
