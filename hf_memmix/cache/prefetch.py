"""Keys and values of an offloaded cache (`offloading=True`) are used only when they have arrived."""

import torch


class _OrderedStream:
    """The stream on which an offloaded cache brings keys and values back, with what the library does not wait for.

    transformers 5.17 reads them from the CPU while the copy to it may still be on its way; newer releases wait. If
    only one layer is offloaded, no release waits until it has come back, although that layer needs it at once.
    """

    def __init__(self, stream, one_layer: bool):
        self.stream, self.one_layer = stream, one_layer

    def __enter__(self):
        self.stream.wait_stream(torch.cuda.default_stream(self.stream.device))
        return self.stream.__enter__()

    def __exit__(self, *error):
        self.stream.__exit__(*error)
        if self.one_layer:
            torch.cuda.default_stream(self.stream.device).wait_stream(self.stream)

    def record_event(self, *args):
        return self.stream.record_event(*args)

    def wait_stream(self, stream):
        self.stream.wait_stream(stream)


def order_prefetch(cache, layers: list):
    """Let an offloaded cache (`offloading=True`) use keys and values of its `layers` only when they have arrived."""
    stream = getattr(cache, "prefetch_stream", None)
    if stream is not None and not isinstance(stream, _OrderedStream):
        offloaded = [layer for layer in layers if not (cache.only_non_sliding and layer.is_sliding)]
        cache.prefetch_stream = _OrderedStream(stream, len(offloaded) == 1)
