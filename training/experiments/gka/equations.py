"""Sections 3 and 6, Appendices C.1, F.3 and H of the GKA paper in float64: what is kept of the Kalman filter,
Algorithm 2, and what sketches and alpha do to the readout of long contexts.

    python training/experiments/gka/equations.py --out gka_equations.json

"kalman": keys k_t of unit norm read a hidden state that drifts, s_t = keep s_{t-1} + sqrt(1 - keep^2) w_t with
v_t = k_t . s_t + noise of variance `NOISE`. The exact filter (equations 12 to 14) knows keep and the noise. It stands
beside the ridge regression with fading weights, which GKA computes, and beside updates that look at the last token
only. Their options are chosen on other seeds. The error is the mean square of estimate minus state over the second
half of the sequence; 1 is that of knowing nothing.

"reversed": the backward pass of Algorithm 2, which computes the iterates of the Chebyshev iteration backwards, beside
autograd. The weights omega are computed backwards, too, as the algorithm does, or kept. "as printed" has the sign of
c_i q of equation 60. "divisor" is Figure 5: the smallest and largest absolute value by which a reversed iteration is
divided, for the Chebyshev iteration (CH) and for conjugate gradients (CG).

"context": pairs of a key and a random value are stored and nothing fades. Every key is asked for once; an answer is
right if its value is the one with the largest product with the output. A share of the square of each key's norm is in
one direction that all keys have in common; the rest is random. A sketch is random and has orthonormal columns.
"""

import itertools
import math
import statistics

import torch
import typer
from torch import Tensor

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.common.harness import Experiment, measured_at
from hf_memmix.training.experiments.common.options import Options

KEEPS, SIZE, CHANNELS, TOKENS, NOISE = (1.0, 0.99, 0.9), 16, 8, 256, 0.05
SEEDS, DEV_SEEDS = range(10), range(100, 105)
DECAYS = (1.0, 0.998, 0.99, 0.97, 0.94, 0.9, 0.8, 0.7, 0.6, 0.5)
RIDGES, STEPS, ADAPTIVE = (0.01, 0.03, 0.1, 0.3, 1.0), (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0), 0.02
ITERATIONS, DIMENSION, PAIRS, SEEDS_OF_PROBLEMS = (10, 30), 64, (16, 64, 256), 7
PROBLEMS = len(PAIRS) * SEEDS_OF_PROBLEMS
DTYPES = {"float64": torch.float64, "float32": torch.float32}
SHARED, CONTEXTS, SHOWN = (0.0, 0.5), (16, 32, 64, 128, 256, 512), (16, 64, 256)
# layers by name: dimensions of the sketch, and alpha; alpha 0 is linear attention
READERS = {"s = D": (64, 1.0), "s = D/2": (32, 1.0), "s = D/4": (16, 1.0)}
READERS |= {"alpha 0.5": (64, 0.5), "linear attention": (64, 0.0)}


def sequences(keep: float, seeds) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [N, T, D], values [N, T, C] and states [N, T, D, C] in float64."""
    keys, values, states = [], [], []
    for seed in seeds:
        draws = torch.Generator().manual_seed(seed)
        k, w, e = (
            torch.randn(TOKENS, *shape, generator=draws, dtype=torch.float64)
            for shape in ((SIZE,), (SIZE, CHANNELS), (CHANNELS,))
        )
        k = k / k.norm(dim=-1, keepdim=True)
        s = [w[0]]
        for drift in w[1:]:
            s.append(keep * s[-1] + math.sqrt(1 - keep**2) * drift)
        states.append(torch.stack(s))
        keys.append(k)
        values.append(torch.einsum("td,tdc->tc", k, states[-1]) + math.sqrt(NOISE) * e)
    return torch.stack(keys), torch.stack(values), torch.stack(states)


def kalman(k: Tensor, v: Tensor, keep: float) -> Tensor:
    """The exact filter's estimates [N, T, D, C]: equations 12 to 14 with A = keep I and Q = (1 - keep^2) I."""
    eye = torch.eye(SIZE, dtype=k.dtype)
    S, P, found = k.new_zeros(len(k), SIZE, v.shape[-1]), eye.expand(len(k), SIZE, SIZE), []
    for t in range(k.shape[1]):
        key = k[:, t, :, None]
        if t:
            S, P = keep * S, keep**2 * P + (1 - keep**2) * eye
        gain = P @ key / (key.mT @ P @ key + NOISE)
        S, P = S + gain * (v[:, t, None] - key.mT @ S), P - gain * (key.mT @ P)
        found.append(S)
    return torch.stack(found, 1)


def fading_ridge(k: Tensor, v: Tensor, decay: float, ridge: float | None) -> Tensor:
    """GKA's regression (equation CH with an exact solver); ridge None: the adaptive 0.02 |H|."""
    eye = torch.eye(SIZE, dtype=k.dtype)
    H, U, found = k.new_zeros(len(k), SIZE, SIZE), k.new_zeros(len(k), SIZE, v.shape[-1]), []
    for t in range(k.shape[1]):
        key = k[:, t, :, None]
        H, U = decay * H + key @ key.mT, decay * U + key @ v[:, t, None]
        lam = ADAPTIVE * torch.linalg.matrix_norm(H)[:, None, None] if ridge is None else ridge
        found.append(torch.linalg.solve(H + lam * eye, U))
    return torch.stack(found, 1)


def last_token(k: Tensor, v: Tensor, decay: float, step: float, delta: bool = True) -> Tensor:
    """The gated delta rule; without `delta` linear attention with a decay, whose values are scaled by the step."""
    S, found = k.new_zeros(len(k), SIZE, v.shape[-1]), []
    for t in range(k.shape[1]):
        key, S = k[:, t, :, None], decay * S
        S = S + step * key @ (v[:, t, None] - key.mT @ S if delta else v[:, t, None])
        found.append(S)
    return torch.stack(found, 1)


# estimators by name: the function of keys, values and options, and the options that are tried
ESTIMATORS = {
    "ridge, fading weights": (fading_ridge, itertools.product(DECAYS, RIDGES)),
    "ridge, fading weights, adaptive": (fading_ridge, itertools.product(DECAYS, [None])),
    "gated delta rule": (last_token, itertools.product(DECAYS, STEPS)),
    "linear attention, decay": (last_token, itertools.product(DECAYS, STEPS, [False])),
}
ESTIMATORS = {name: (function, list(options)) for name, (function, options) in ESTIMATORS.items()}


def errors(estimates: Tensor, states: Tensor) -> list[float]:
    """The mean square of estimate minus state over the second half, for each seed."""
    late = slice(estimates.shape[1] // 2, None)
    return (estimates - states)[:, late].square().mean((1, 2, 3)).tolist()


def filters(keep: float) -> dict:
    """The errors of all estimators, their options, and the distance of the steady filter from the ridge regression."""
    dev_k, dev_v, dev_s = sequences(keep, DEV_SEEDS)
    k, v, s = sequences(keep, SEEDS)
    exact = kalman(k, v, keep)
    found, chosen = {"Kalman filter": errors(exact, s)}, {}
    for name, (function, options) in ESTIMATORS.items():
        best = min(options, key=lambda tried: statistics.fmean(errors(function(dev_k, dev_v, *tried), dev_s)))
        found[name], chosen[name] = errors(function(k, v, *best), s), list(best)
    result = {"errors": found, "options": chosen}
    if keep == 1:  # prior I and noise r: the ridge is r (equation KF)
        result["distance_from_ridge"] = (exact - fading_ridge(k, v, 1.0, NOISE)).abs().max().item()
    return result


def chebyshev(A: Tensor, q: Tensor, low: float, high: float, iterations: int) -> tuple[Tensor, Tensor, list[float]]:
    """The last two iterates [D] of Algorithm 1 with omega_0 = 2, and the omegas from 0 on."""
    rho, step, omegas = (high - low) / (high + low), 2 / (high + low), [2.0]
    before, x = torch.zeros_like(q), step * q
    for _ in range(iterations):
        omegas.append(4 / (4 - rho**2 * omegas[-1]))
        omega = omegas[-1]
        x, before = x - omega * step * (A @ x - q) + (omega - 1) * (x - before), x
    return x, before, omegas


def reversed_backward(
    A: Tensor, q: Tensor, low: float, high: float, last: tuple, dx: Tensor, sign: int = -1
) -> tuple[Tensor, Tensor]:
    """dH [D, D] and dq [D] of Algorithm 2 from the last two iterates, the omegas and dx.

    last: those of `chebyshev`; a single omega is computed backwards by equation 62. sign: that of c_i q.
    """
    x, before, omegas = last
    rho, step, r = (high - low) / (high + low), 2 / (high + low), len(omegas) - 1
    nu, kept = torch.tensor(omegas[-1], dtype=A.dtype), omegas
    later, g, dH, dq, nu_later = torch.zeros_like(dx), dx, torch.zeros_like(A), torch.zeros_like(q), 0.0
    for i in range(r, 0, -1):
        if kept[i] is not None:
            nu = torch.tensor(kept[i], dtype=A.dtype)
        c = step * nu
        dH, dq = dH - c * torch.outer(g, before), dq + c * g
        g_before = nu * g - c * (A @ g) - (nu_later - 1) * later if i < r else nu * g - c * (A @ g)
        if i > 1:
            x, before = before, -(x - (nu * before - c * (A @ before)) + sign * c * q) / (nu - 1)
        later, g, nu_later = g, g_before, nu
        nu = 4 / rho**2 * (1 - 1 / nu)
    return dH, dq + step * g


def conjugate_divisors(A: Tensor, q: Tensor, iterations: int) -> list[float]:
    """|b_i| of conjugate gradients as a recursion of three terms, x_i = ... + b_i x_{i-2}, as equation 54."""
    r, p, size, found, alpha_before, beta = q, q, q @ q, [], None, None
    for _ in range(iterations):
        image = A @ p
        alpha = size / (p @ image)
        if alpha_before is not None:
            found.append((alpha * beta / alpha_before).abs().item())
        r = r - alpha * image
        last, size, alpha_before = size, r @ r, alpha
        beta = size / last
        p = r + beta * p
    return found


def reversal(dtype: str, iterations: int) -> dict:
    """log10 of the relative errors of dH for each way, one value per problem, and the divisors."""
    found: dict[str, list[float]] = {"omegas kept": [], "omegas backwards": [], "as printed": []}
    divisors: dict[str, list[float]] = {"CH": [], "CG": []}
    for pairs, seed in itertools.product(PAIRS, range(SEEDS_OF_PROBLEMS)):
        draws = torch.Generator().manual_seed(seed)
        k = torch.randn(pairs, DIMENSION, generator=draws, dtype=torch.float64)
        q, dx = torch.randn(2, DIMENSION, generator=draws, dtype=torch.float64)
        k, q = k / k.norm(dim=-1, keepdim=True), q / q.norm()
        H = k.mT @ k
        H = (H / torch.linalg.matrix_norm(H) + ADAPTIVE * torch.eye(DIMENSION, dtype=H.dtype)).requires_grad_()
        bounds = ADAPTIVE, 1 + ADAPTIVE
        chebyshev(H, q, *bounds, iterations)[0].backward(dx)
        A, of_dtype = H.detach().to(DTYPES[dtype]), [t.to(DTYPES[dtype]) for t in (q, dx)]
        x, before, omegas = chebyshev(A, of_dtype[0], *bounds, iterations)
        alone = [None] * iterations + omegas[-1:]
        ways = {"omegas kept": (omegas, -1), "omegas backwards": (alone, -1), "as printed": (omegas, 1)}
        for name, (given, sign) in ways.items():
            dH, _ = reversed_backward(A, of_dtype[0], *bounds, (x, before, given), of_dtype[1], sign)
            error = (dH.double() - H.grad).norm() / H.grad.norm()
            found[name].append(error.nan_to_num(math.inf).clamp(1e-17, 1e17).log10().item())
        divisors["CH"] += [omega - 1 for omega in omegas[2:]]
        divisors["CG"] += conjugate_divisors(A, of_dtype[0], iterations)
    finite = {name: [value for value in of if math.isfinite(value)] for name, of in divisors.items()}
    return {"log10_errors": found, "divisors": {name: [min(of), max(of)] for name, of in finite.items()}}


def answers(shared: float, pairs: int) -> dict:
    """The share of right answers of every layer of `READERS`, one per seed."""
    found: dict[str, list[float]] = {name: [] for name in READERS}
    for seed in SEEDS:
        draws = torch.Generator().manual_seed(seed)
        k, v = torch.randn(2, pairs, DIMENSION, generator=draws, dtype=torch.float64)
        common, matrix = torch.randn(2, DIMENSION, DIMENSION, generator=draws, dtype=torch.float64)
        k, common = k / k.norm(dim=-1, keepdim=True), common[0] / common[0].norm()
        k = (1 - shared) ** 0.5 * k + shared**0.5 * common
        k = k / k.norm(dim=-1, keepdim=True)
        for name, (size, alpha) in READERS.items():
            q = k if size == DIMENSION else k @ torch.linalg.qr(matrix)[0][:, :size]
            H = q.mT @ q
            A = H + ADAPTIVE * torch.linalg.matrix_norm(H) * torch.eye(size, dtype=H.dtype)
            y = (q + alpha * (torch.linalg.solve(A, q.mT).mT - q)) @ (q.mT @ v)
            found[name].append(((y @ v.mT).argmax(-1) == torch.arange(pairs)).double().mean().item())
    return {"answers": found}


def run(row: dict, args) -> dict:
    if row["part"] == "context":
        return answers(row["shared"], row["pairs"])
    return filters(row["keep"]) if row["part"] == "kalman" else reversal(row["dtype"], row["iterations"])


def table(results: dict) -> str:
    """The errors of the estimators by drift, those of the reversed backward pass, and answers by context."""
    kalman_rows = [row for row in results["rows"] if row["part"] == "kalman"]
    names = list(kalman_rows[0]["errors"])
    lines = [[name, *(f"{statistics.fmean(row['errors'][name]):.4f}" for row in kalman_rows)] for name in names]
    head = ["mean square error, state keeps", *(f"{row['keep']:g}" for row in kalman_rows)]
    reversals = [row for row in results["rows"] if row.get("iterations") == ITERATIONS[-1]]
    ways = list(reversals[0]["log10_errors"])
    second = []
    for row in reversals:
        divisors = [f"{low:.1g} to {high:.1g}" for low, high in row["divisors"].values()]
        errors_of = [f"{10 ** statistics.fmean(row['log10_errors'][way]):.0e}" for way in ways]
        second.append([row["dtype"], *errors_of, *divisors])
    second_head = [
        f"{ITERATIONS[-1]} iterations reversed in",
        *ways,
        *(f"divisor, {name}" for name in reversals[0]["divisors"]),
    ]
    distance = next(row["distance_from_ridge"] for row in kalman_rows if "distance_from_ridge" in row)
    asked = [row for row in results["rows"] if row["part"] == "context" and row["pairs"] in SHOWN]
    third, names = [], list(READERS)
    for shared, name in [(0.0, name) for name in names[:3]] + [(0.5, name) for name in (names[0], *names[3:])]:
        shares = [statistics.fmean(row["answers"][name]) for row in asked if row["shared"] == shared]
        third.append([name + ", shared" * (shared > 0), *(f"{100 * share:.0f}" for share in shares)])
    third_head = ["right answers, %, pairs", *map(str, SHOWN)]
    return (
        f"{markdown_table(head, lines)}\n\nMeans of {len(SEEDS)} seeds. Without drift the filter is the ridge"
        f" regression: they differ by {distance:.0e} at most.\n\n{markdown_table(second_head, second)}\n\nRelative"
        f" error of dH (geometric mean of {PROBLEMS} problems with {', '.join(map(str, PAIRS))} pairs of"
        f" {DIMENSION} dimensions).\n\n{markdown_table(third_head, third)}\n\nMeans of {len(SEEDS)} seeds; D ="
        f" {DIMENSION}. {measured_at(results)}."
    )


def rows_to_run(done: list[dict], args) -> list[dict]:
    pairs = itertools.product(DTYPES, ITERATIONS)
    return (
        [{"part": "kalman", "keep": keep} for keep in KEEPS]
        + [{"part": "reversed", "dtype": dtype, "iterations": iterations} for dtype, iterations in pairs]
        + [{"part": "context", "shared": shared, "pairs": pairs} for shared in SHARED for pairs in CONTEXTS]
    )


main = Experiment("gka_equations", __file__, Options, rows_to_run).command()


if __name__ == "__main__":
    typer.run(main)
