"""The schedule of the solver: relaxation weights of the Chebyshev iteration, and phases of iterative refinement.

The ridge is proportional to |H|, so the bounds of the spectrum are mu = a|H| and L = (1 + a)|H|. Therefore rho =
(L - mu)/(L + mu) = 1/(1 + 2a), and the weights omega_i are the same for every token: they are constants of the kernel.
"""

import functools
import math
from collections.abc import Iterable

MAX_PHASES = 8
# more iterations of z in the last of several phases, see `gradient_phases`
MORE_FOR_GRADIENT = 4


def omegas(num_iterations: int, ridge: float) -> list[float]:
    """omega_1 .. omega_r of the Chebyshev iteration (Gated KalmaNet, Appendix B): omega_0 = 2, and
    omega_i = 4 / (4 - rho^2 omega_{i-1})."""
    rho2 = (1 + 2 * ridge) ** -2
    weights, omega = [], 2.0
    for _ in range(num_iterations):
        omega = 4 / (4 - rho2 * omega)
        weights.append(omega)
    return weights


@functools.cache
def richardson_steps(num_iterations: int, ridge: float) -> tuple[float, ...]:
    """The `num_iterations` + 1 steps tau_i, in units of 1/|H|, of the same polynomial in product form.

    x += tau r; r -= tau A r over the roots 1/tau of the shifted Chebyshev polynomial gives exactly the iterate of the
    three-term recurrence. It needs two vectors instead of three, and in Leja order (each root as far as possible from
    those before it, in product of distances) rounding stays lower: gka/README.md, "Product form".
    """
    count = num_iterations + 1
    remaining = [0.5 + ridge + 0.5 * math.cos(math.pi * (j + 0.5) / count) for j in range(count)]
    ordered = [remaining.pop(0)]
    while remaining:
        best = max(remaining, key=lambda root: sum(math.log(abs(root - other)) for other in ordered))
        remaining.remove(best)
        ordered.append(best)
    return tuple(1 / root for root in ordered)


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


def gradient_phases(phases: Iterable[int]) -> tuple[int, ...]:
    """The schedule of the backward's solution z, for a forward pass that ran `phases`.

    dk contains alpha s (v . do) - k . z, the difference of two numbers that are up to 1 / ridge times larger where few
    keys fill the state. The residual of a schedule such as (12, 10), 0.5 % of z, is then 5 % of dk. A single phase is
    kept: it either has converged, as the paper's 30 iterations, or is short on purpose.
    """
    *earlier, last = phases
    return (*earlier, last + MORE_FOR_GRADIENT) if earlier else (last,)
