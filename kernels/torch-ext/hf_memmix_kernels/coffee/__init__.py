"""COFFEE: a state that gates its own update (naive, scan, DEER, one decode step)."""

from .naive import naive_coffee
from .op import check_coffee, coffee, coffee_step, deer_coffee, scan_coffee
from .plan import coffee_method

__all__ = [
    "check_coffee",
    "coffee",
    "coffee_method",
    "coffee_step",
    "deer_coffee",
    "naive_coffee",
    "scan_coffee",
]
