"""Memory that results may not share with inputs or with each other."""

from __future__ import annotations


def are_apart(addresses: list[int], spans: list[tuple[int, int]], results: list[int]) -> bool:
    """Whether `check_overlap` has nothing to refuse, asked without names: a call takes few microseconds.

    Parameters
    ----------
    addresses : list of int
        Of the arguments; 0 for those left out.
    spans : list of (int, int)
        The lowest byte that each touches, counted from there, and one more than the highest.
    results : list of int
        Places of those that are written.
    """
    for i in results:
        if addresses[i]:
            start, stop = addresses[i] + spans[i][0], addresses[i] + spans[i][1]
            for j, (address, (low, high)) in enumerate(zip(addresses, spans)):
                if address and start < address + high and address + low < stop and i != j:
                    return False
    return True


def check_overlap(spans: dict[str, tuple[int, int]], results: tuple[str, ...]) -> None:
    """Refuse results that share memory with an input or with each other.

    Address intervals are compared, so arrays that interleave without sharing an element are refused as well.

    Parameters
    ----------
    spans : dict of str to (int, int)
        Lowest address that each argument touches, and one more than the highest, by its name.
    results : tuple of str
        Which of them are written.

    Raises
    ------
    ValueError
    """
    spans = {name: span for name, span in spans.items() if span[0] < span[1]}
    for name in results:
        start, stop = spans.pop(name, (0, 0))
        for other, (low, high) in spans.items():
            if start < high and low < stop:
                raise ValueError(
                    f"{name}: expected memory apart from that of {other} ({low:#x} to {high:#x}), "
                    f"got {start:#x} to {stop:#x}"
                )
