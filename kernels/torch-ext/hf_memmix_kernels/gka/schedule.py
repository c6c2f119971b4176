"""The solver's schedule: relaxation weights of the Chebyshev iteration and its phases of iterative refinement.

With the ridge proportional to |H| the spectrum bounds are mu = a|H| and L = (1 + a)|H|, so rho = (L - mu)/(L + mu)
= 1/(1 + 2a) and the weights omega_i are the same for every token: they are constants of the kernel.
"""

from collections.abc import Iterable

MAX_PHASES = 8


def omegas(num_iterations: int, ridge: float) -> list[float]:
    """omega_1 .. omega_r of the Chebyshev iteration (Gated KalmaNet, Appendix B): omega_0 = 2, and
    omega_i = 4 / (4 - rho^2 omega_{i-1})."""
    rho2 = (1 + 2 * ridge) ** -2
    weights, omega = [], 2.0
    for _ in range(num_iterations):
        omega = 4 / (4 - rho2 * omega)
        weights.append(omega)
    return weights


def as_phases(num_iterations: int, refinement: Iterable[int] | None) -> tuple[int, ...]:
    """The phases to run: `refinement` if given, else one phase of `num_iterations`.

    Raises:
        ValueError: a phase is not an integer >= 1, or there are more than `MAX_PHASES`.
    """
    phases = (num_iterations,) if refinement is None else tuple(refinement)
    name = "num_iterations" if refinement is None else "refinement"
    if not phases or len(phases) > MAX_PHASES:
        raise ValueError(f"{name} needs 1 to {MAX_PHASES} phases, got {len(phases)}; e.g. refinement=(7, 7, 7)")
    for count in phases:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name}={count!r}: an iteration count must be an integer >= 1; the paper's is 30")
    return phases
