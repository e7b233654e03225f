"""What was found out before, by what it depends on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

Found = TypeVar("Found")


class Known(Generic[Found]):
    """The last results of a function, by what they were made of, as of plans of one device; for several threads.

    Parameters
    ----------
    most : int
        How many are kept.
    """

    def __init__(self, most: int) -> None:
        self._most, self._found, self._lock = most, {}, threading.Lock()

    def found(self, key: tuple[Any, ...], make: Callable[[], Found]) -> Found:
        """What was made of an equal key, or what is made now; a key that cannot be one, such as a list as window, is not kept."""
        try:
            with self._lock:
                known = self._found.pop(key, None)
        except TypeError:
            return make()
        known = make() if known is None else known
        with self._lock:
            self._found[key] = known
            if len(self._found) > self._most:
                self._found.pop(next(iter(self._found)))
        return known


def key_of(options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Options as a part of a key. Their types tell True from 1, which are equal but not as options; inside of a pair as well."""
    types = [tuple(map(type, x)) if type(x) is tuple else type(x) for x in options.values()]
    return (*options.items(), *types)
