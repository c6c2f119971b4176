"""Where the commands take `model_folder` from."""

from hf_memmix.hub import model_folder

__all__ = ["model_folder"]
