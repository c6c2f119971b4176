"""A module that replaces a decoder layer's MLP, for families whose feed-forward differs from the backbone's."""

from torch import Tensor, nn

from .tp_plan import TensorParallelPlan


class FeedForward(nn.Module):
    """Base class of such modules; a family's configuration makes them in `make_feed_forward`."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden], token by token."""
        raise NotImplementedError

    def tp_plan(self, ranks: int) -> TensorParallelPlan:
        """What each of `ranks` ranks of tensor parallelism holds of the module; by default, all of it."""
        return TensorParallelPlan(ranks)

    def init_weights(self):
        """Fill the parameters by `transformers.initialization`, which does not change loaded ones."""
        raise NotImplementedError
