"""Imported for its effect: accelerate shards models by FSDP2 on CPUs too, where it would use DDP."""

import torch.distributed.fsdp
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

_library_init = AcceleratorState.__init__


def _init(self, *args, fsdp_plugin=None, **kwargs):
    _library_init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    # every new state object starts from the kind of the processes, and shares all else with the first
    self.fsdp_plugin = fsdp_plugin or vars(self).get("fsdp_plugin")
    if fsdp_plugin is not None and self._mixed_precision != "no":  # as on GPUs
        fsdp_plugin.set_mixed_precision(self._mixed_precision)
    if self.fsdp_plugin is not None:
        self.distributed_type = DistributedType.FSDP


AcceleratorState.__init__ = _init


class _Unpinned(torch.distributed.fsdp.CPUOffloadPolicy):
    """Memory can be pinned for an accelerator only."""

    def __init__(self):
        super().__init__(pin_memory=False)


torch.distributed.fsdp.CPUOffloadPolicy = _Unpinned
