"""What is measured: problems, and the suites of them.

Rates count the work that the problem has, not what a kernel does: for each pair of a query and a key that see each other
2 * (dim + dim_v) operations forward and 2 * (3 * dim + 2 * dim_v) backward, where P is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product

DIRECTIONS = ("forward", "backward")
TOKENS = 16_384  # of a batch, in the FlashAttention papers' setting
HIDDEN = 2048  # heads times dim there


@dataclass(frozen=True)
class Cell:
    """A problem with as many queries as keys, and as many key heads as query heads.

    Parameters
    ----------
    direction : {'forward', 'backward'}
        The backward is timed without the forward before it.
    dtype : str
    dim : int
    causal : bool
    seq, batch, heads : int
    dim_v : int, optional
        Of values and results, where these are not as wide as keys.
    """

    direction: str
    dtype: str
    dim: int
    causal: bool
    seq: int
    batch: int
    heads: int
    dim_v: int | None = field(default=None, kw_only=True)

    def __str__(self) -> str:
        return f"{self.direction} {self.dtype} {self.batch}x{self.heads}x{self.seq}x{self.dims} {self.mask}"

    @property
    def dims(self) -> str:
        """Of keys, and of values if that is another: '128', or '192/128'."""
        return str(self.dim) if self.dim_v is None else f"{self.dim}/{self.dim_v}"

    @property
    def mask(self) -> str:
        """'causal' or 'full'."""
        return "causal" if self.causal else "full"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, seq, dim), of q and k."""
        return self.batch, self.heads, self.seq, self.dim

    @property
    def shape_v(self) -> tuple[int, int, int, int]:
        """(batch, heads, seq, dim_v), of v, the result and its gradient."""
        return self.batch, self.heads, self.seq, self.dim_v or self.dim

    @property
    def pairs(self) -> int:
        """Of a query and a key that it sees, in each head."""
        return self.seq * (self.seq + 1) // 2 if self.causal else self.seq**2

    @property
    def flops(self) -> int:
        """Operations of the matrix products, masked pairs not counted."""
        dim_v = self.dim_v or self.dim
        each = 2 * (self.dim + dim_v) if self.direction == "forward" else 2 * (3 * self.dim + 2 * dim_v)
        return each * self.pairs * self.heads * self.batch


@dataclass(frozen=True)
class Suite:
    """Cells to choose from: every combination of what is listed, with `TOKENS` tokens of `HIDDEN` numbers.

    Parameters
    ----------
    dtypes : tuple of str
    dims, seqs : tuple of int
    masks : tuple of bool
        Whether causal.
    dim_v : int, optional
        As of a `Cell`.
    """

    dtypes: tuple[str, ...]
    dims: tuple[int, ...]
    seqs: tuple[int, ...]
    masks: tuple[bool, ...] = (False, True)
    dim_v: int | None = None

    def cells(self, directions: Iterable[str]) -> tuple[Cell, ...]:
        """The cells; those that a table shows beside each other come one after another."""
        return tuple(
            Cell(direction, dtype, dim, causal, seq, max(1, TOKENS // seq), max(1, HIDDEN // dim), dim_v=self.dim_v)
            for direction, dtype, dim, causal, seq in product(directions, self.dtypes, self.dims, self.masks, self.seqs)
        )


SUITES = {
    "paper": Suite(("bfloat16",), (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16_384)),
    "quick": Suite(("float16", "bfloat16"), (64, 128), (1024, 4096, 16_384)),
}
