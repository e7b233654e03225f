"""The arrays of a call, as kernels take them."""

from __future__ import annotations

from typing import Any

from ..problem import arrays


class Operands:
    """The arrays of a call: as given, as NumPy or CuPy views, their descriptions and addresses; None and 0 for those left out.

    Parameters
    ----------
    names : tuple of str
        What error messages call them.
    given : tuple of array or None
    required : int
        How many of them, at the beginning, cannot be left out.
    results : int
        How many of them, at the end, are written.
    """

    __slots__ = ("addresses", "arrays", "descriptions", "views")

    def __init__(self, names: tuple[str, ...], given: tuple[Any, ...], required: int, results: int) -> None:
        self.arrays = given
        self.views: list[Any] = []
        self.descriptions: list[Any] = []
        self.addresses: list[int] = []
        inputs = len(given) - results
        for i, x in enumerate(given):
            description, address = None, 0
            if x is not None or i < required:
                x = arrays.view(x, names[i], writable=i >= inputs)
                description, address = arrays.describe(x)
            self.views.append(x)
            self.descriptions.append(description)
            self.addresses.append(address)
