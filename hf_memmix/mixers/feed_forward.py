"""A module in place of a decoder layer's MLP, for families whose feed-forward is not the backbone's."""

from torch import Tensor, nn


class FeedForward(nn.Module):
    """Base of such modules; a family's configuration names them in `make_feed_forward`."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden], token by token."""
        raise NotImplementedError

    def init_weights(self):
        """Fill the parameters with `transformers.initialization`, which leaves loaded ones alone."""
        raise NotImplementedError
