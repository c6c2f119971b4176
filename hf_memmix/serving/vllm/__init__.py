"""The plugin of vLLM: `vllm serve FOLDER` serves every folder that hf_memmix has saved.

vLLM calls `register` (entry point `vllm.general_plugins`) in each of its processes. It only tells vLLM the names of
our model classes. All other code of this package, and everything that changes how vLLM works, is loaded when one of
these models is asked for: a process that serves another model stays as it is.
"""


def register():
    """Tell vLLM the names of the model classes; may be called again."""
    from . import registration

    registration.register()
