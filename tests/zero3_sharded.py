"""Imported for its effect: ZeRO-3 shards parameters of every size.

By default it leaves those below 100,000 entries whole, which are all of a tiny model.
"""

import deepspeed

_library_initialize = deepspeed.initialize


def _initialize(**arguments):
    arguments["config_params"]["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return _library_initialize(**arguments)


deepspeed.initialize = _initialize
