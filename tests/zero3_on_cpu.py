"""Imported for its effect: accelerate and DeepSpeed train on CPUs by gloo.

accelerate gives DeepSpeed the backend of a GPU only, and DeepSpeed would first compile a C++ extension for shared
memory.
"""

import sys

import deepspeed  # noqa: F401
from accelerate.state import PartialState
from accelerate.utils import DistributedType

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_CPU)
