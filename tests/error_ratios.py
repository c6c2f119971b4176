"""Records how close measured errors are to their bounds: pytest --error-ratios FILE, then
python tests/error_ratios.py FILE.

A bound that a correct result only just meets on one processor may fail on another. With the option, each comparison of
`testing.py`, `kernels/checks.py`, torch.testing.assert_close and pytest.approx records measured error / bound (for a
lower bound: bound / measured), and each test appends its largest ratio to FILE. The script prints the largest ones.
Comparisons with a bound of zero require equality and are not recorded.
"""

import sys

import pytest

ABOVE = 0.1  # the script lists the ratios above this


class Measured(float):
    """A measured error that records its ratio to every bound with which it is compared."""

    record = None

    def __le__(self, bound):
        if bound:
            Measured.record(float(self) / float(bound), float(self), float(bound))
        return float(self) <= bound

    def __lt__(self, bound):
        return self <= bound and float(self) < bound

    def __gt__(self, bound):
        if self:
            Measured.record(float(bound) / float(self), float(self), float(bound))
        return float(self) > bound

    __hash__ = float.__hash__


def _ratio_of_tensors(actual, expected, rtol, atol):
    import torch

    actual, expected = (torch.as_tensor(t).detach().double() for t in (actual, expected))
    bound = atol + rtol * expected.abs()
    if not actual.numel() or actual.shape != expected.shape or not bound.any():
        return None
    ratio = (actual - expected).abs() / bound.clamp_min(1e-300)
    return ratio.nan_to_num(0.0).max().item()


class Recorder:
    """The pytest plugin. It wraps the comparisons and writes one line per test."""

    def __init__(self, path):
        self.path, self.largest = path, None
        Measured.record = self.record

    def record(self, ratio, measured, bound):
        if self.largest is None or ratio > self.largest[0]:
            self.largest = (ratio, measured, bound)

    def wrap_measure(self, module, name):
        """Replace the function by one whose result records the bounds with which it is compared."""
        measure = getattr(module, name)
        setattr(module, name, lambda *args, **kwargs: Measured(measure(*args, **kwargs)))

    def wrap_assert_close(self):
        import torch
        from torch.testing import _comparison

        close = torch.testing.assert_close

        def assert_close(actual, expected, *args, rtol=None, atol=None, **kwargs):
            if isinstance(actual, (torch.Tensor, float)) and isinstance(expected, (torch.Tensor, float)):
                bounds = (
                    (rtol, atol)
                    if rtol is not None
                    else _comparison.get_tolerances(actual, expected, rtol=None, atol=None)
                )
                ratio = _ratio_of_tensors(actual, expected, *bounds)
                if ratio is not None:
                    self.record(ratio, ratio, 1.0)
            return close(actual, expected, *args, rtol=rtol, atol=atol, **kwargs)

        torch.testing.assert_close = assert_close

    def wrap_approx(self):
        ApproxScalar = type(pytest.approx(1.0))
        equal = ApproxScalar.__eq__

        def __eq__(approx, actual):
            if isinstance(actual, float) and approx.tolerance:
                error = abs(actual - approx.expected)
                self.record(error / approx.tolerance, error, approx.tolerance)
            return equal(approx, actual)

        ApproxScalar.__eq__ = __eq__

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        self.largest = None
        try:
            return (yield)
        finally:
            if self.largest is not None:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write("{:.3g}\t{:.3g}\t{:.3g}\t{}\n".format(*self.largest, item.nodeid))


def start(path):
    """The plugin object, with all comparisons wrapped; call it before the test modules are imported."""
    import checks

    import testing

    recorder = Recorder(path)
    recorder.wrap_measure(testing, "difference")
    recorder.wrap_measure(checks, "error")
    recorder.wrap_assert_close()
    recorder.wrap_approx()
    return recorder


def main(path):
    rows = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            ratio, measured, bound, test = line.rstrip("\n").split("\t")
            rows[test] = max(rows.get(test, (0.0,)), (float(ratio), measured, bound))
    for test, (ratio, measured, bound) in sorted(rows.items(), key=lambda row: -row[1][0]):
        if ratio > ABOVE:
            print(f"{ratio:6.2f}  {measured:>9} of {bound:>9}  {test}")
    print(f"{len(rows)} tests compared, the largest ratio is {max(r[0] for r in rows.values()):.2f}")


if __name__ == "__main__":
    main(sys.argv[1])
