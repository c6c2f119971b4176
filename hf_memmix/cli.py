"""`python -m hf_memmix.cli`, for launchers that start a module (`accelerate launch -m`); see hf_memmix/commands."""

from hf_memmix.commands import app, main

__all__ = ["app", "main"]

if __name__ == "__main__":
    main()
