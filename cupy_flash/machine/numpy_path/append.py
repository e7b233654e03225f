"""New rows written into caches, in array code."""

from __future__ import annotations

import numpy


def append(
    cache: numpy.ndarray,
    rows: numpy.ndarray,
    lengths: numpy.ndarray,
    counts: numpy.ndarray,
    pages: numpy.ndarray | None,
    cache_rows: numpy.ndarray | None,
) -> None:
    """Write the first rows of each batch element behind those that are there.

    Parameters
    ----------
    cache
        `(pages, heads, page size, dim)`; without a table of pages, each sequence is a page.
    rows
        `(batch, heads, seq, dim)`.
    lengths, counts
        `(batch,)`: rows that are there, and how many are appended. All of them have places.
    pages
        `(batch, pages of a sequence)`, or None.
    cache_rows
        `(batch,)`: the page that a sequence is, of which a negative one is left out; by default its number.
    """
    page_size = cache.shape[2]
    for element, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist())):
        new = rows[element, :, :count]
        if pages is not None:
            places = numpy.arange(length, length + count)
            cache[pages[element, places // page_size], :, places % page_size] = new.swapaxes(0, 1)
        elif cache_rows is None or cache_rows[element] >= 0:
            cache[element if cache_rows is None else cache_rows[element], :, length : length + count] = new
