"""What a plan has to know about a GPU generation."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnsupportedError, shown


@dataclass(frozen=True, slots=True)
class Architecture:
    """A compilation target.

    Parameters
    ----------
    name : str
        As the compiler spells it behind ``sm_``.
    number : int
        Ten times the compute capability.
    shared_bytes : int
        Shared memory one block may have (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
    """

    name: str
    number: int
    shared_bytes: int

    def __str__(self) -> str:
        return f"sm_{self.name}"

    @property
    def copies_ahead(self) -> bool:
        """Whether it has asynchronous copies to shared memory."""
        return self.number >= 80


ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture("75", 75, 64 << 10),
        Architecture("80", 80, 163 << 10),
        Architecture("86", 86, 99 << 10),
        Architecture("89", 89, 99 << 10),
        Architecture("90a", 90, 227 << 10),
        Architecture("100", 100, 227 << 10),
        Architecture("120", 120, 99 << 10),
    )
}
HOST = ARCHITECTURES["80"]  # what the host executes unless told otherwise: the family most others build on


def architecture_named(name: str) -> Architecture:
    """The architecture of this name; ``sm_90a``, ``90a`` and ``90`` all mean the same one."""
    if not isinstance(name, str):
        raise TypeError(f"arch: expected one of {', '.join(ARCHITECTURES)}, got {shown(name)}")
    short = str.__str__(name).removeprefix("sm_")
    for candidate in (short, short + "a"):
        if candidate in ARCHITECTURES:
            return ARCHITECTURES[candidate]
    raise UnsupportedError(f"arch: expected one of {', '.join(ARCHITECTURES)}, got {shown(name)}")


def architecture_of(capability: str) -> Architecture:
    """The best target for a device, by its compute capability without the dot ('86', '103').

    Machine code runs on later minor versions of its own major version, so the newest target not beyond the device serves.
    """
    number = int(capability)
    usable = [a for a in ARCHITECTURES.values() if a.number // 10 == number // 10 and a.number <= number]
    if not usable:
        raise UnsupportedError(
            f"device: expected compute capability 7.5 or one of the major versions 8, 9, 10, 12, "
            f"got {number // 10}.{number % 10}"
        )
    return max(usable, key=lambda a: a.number)
