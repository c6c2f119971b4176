"""Models of the Transformers backend beside others of their class, such as a trainer's, in one process.

vLLM makes the class of a backbone compile itself, in place: the other models of the class lack what that needs.
"""

import functools
import inspect

from torch import nn
from vllm.config import get_current_vllm_config_or_none


def share_class(cls: type[nn.Module]):
    """Let the models of a class that are not vLLM's start and run as without vLLM, with their hooks."""
    start, call = vars(cls).get("__init__"), vars(cls).get("__call__")
    if call is None or hasattr(call, "__wrapped__"):
        return
    own_start = inspect.getclosurevars(start).nonlocals.get("old_init", start)

    @functools.wraps(own_start)  # transformers looks at the signature
    def start_either(self, *args, **kwargs):
        ours = "vllm_config" in kwargs or get_current_vllm_config_or_none() is not None
        (start if ours else own_start)(self, *args, **kwargs)

    @functools.wraps(call)
    def call_either(self, *args, **kwargs):
        return (call if "do_not_compile" in vars(self) else nn.Module.__call__)(self, *args, **kwargs)

    cls.__init__, cls.__call__ = start_either, call_either
