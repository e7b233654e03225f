// rotate.cu -- rotary position embedding (Su et al., 2021): each row turned by angles that its position tells
//
//   for each row of each head, at a position t, and each pair of its elements (a, b), number i of `pairs`:
//     out = (a cos[t, i] - b sin[t, i],  b cos[t, i] + a sin[t, i])
//   elements behind the pairs are copied
//
// Scores of rows that were rotated so depend on how far apart their positions are, and not on where they are.
#include "config.cuh"
#include "row_params.cuh"
#include "tile/rotation.cuh"
#include "tile/scheduler.cuh"

KERNEL(32 * WARPS, 1) rotate(GRID_CONSTANT RotateParams p) {
  const BlockCoord here = block_coord(p.batch, 1, p.rows, TILE_Q);  // rows of all heads of a batch element, head after head
  for_chunks(here.row, p.rows, p.chunks_divmod, [&](int number, int chunk) {
    const int head = int(divide(number, p.len_divmod)), row = number - head * int(p.len_divmod.divisor);
    const GlobalTile x = slice(p.x, here.batch, head, row, row + 1, p.dim), out = slice(p.out, here.batch, head, row, row + 1, p.dim);
    rotate_chunk(p, out, x, chunk, p.positions.data ? position_of(p, here.batch, row) : p.first_position + row);
  });
}
