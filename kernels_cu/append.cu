// append.cu -- new keys and values written into a cache, behind those that are there:
//
//   for each new row i < seqlens_new[b] of each head of each batch element b:
//     t = seqlens[b] + i                                      its place in the sequence
//     page, row = cache_batch_idx[b], t                       in a cache with a sequence in each of its rows
//               = pages[b, t / page_size], t % page_size      in one of pages
//     k_cache[page, head, row] = k[b, head, i], rotated by the angles of t, or of a position of its own
//     v_cache[page, head, row] = v[b, head, i]
//   with ROTATE_Q, for each of its rows of each query head:
//     q_out[b, head, i] = q[b, head, i], rotated by the same angles
//
// What has no place in the cache is left out. Nothing else of the cache is touched. Queries are all rotated, by the nearest angles that there are.
#include "config.cuh"
#include "row_params.cuh"
#include "tile/rotation.cuh"
#include "tile/scheduler.cuh"

// Where a new row of a head comes from and goes to, and at which place of its sequence it is.
struct NewRow {
  int head, from;
  int page[BATCH_AXES];
  int to;
  i64 place;
  bool exists;
};

// `number` counts the new rows of all heads of a batch element, head after head.
OP NewRow new_row(const AppendParams& p, const BlockCoord& here, int number, i64 length, i64 count) {
  NewRow row{};
  row.head = int(divide(number, p.len_divmod));
  row.from = number - row.head * int(p.len_divmod.divisor);
  row.place = i64(u64(length) + row.from);                    // of a length beyond all capacities, it only wraps
  row.exists = length >= 0 && row.from < count && u64(row.place) < u64(p.capacity);
  if (!row.exists) return row;
  i64 page = here.batch_number;
  u32 page_number = 0;
  if (p.pages.data) {
    page_number = divide(u32(row.place), p.page_divmod);
    page = read(p.pages, here.batch, int(page_number));
  } else if (p.cache_batch_idx.data) {
    page = read(p.cache_batch_idx, here.batch);
  }
  row.exists = u64(page) < u64(p.page_count);
  row.page[BATCH_AXES - 1] = int(page);
  row.to = int(row.place) - int(page_number * p.page_divmod.divisor);
  return row;
}

KERNEL(32 * WARPS, 1) append(GRID_CONSTANT AppendParams p) {
  const BlockCoord here = block_coord(p.batch, 1, ROTATE_Q ? p.q_first + p.q_rows : p.rows, TILE_Q);  // queries have blocks of their own
  const i64 length = p.seqlens.data ? read(p.seqlens, here.batch) : p.length;
  if constexpr (ROTATE_Q) {
    if (here.row >= p.q_first) {
      for_chunks(here.row - p.q_first, p.q_rows, p.k_chunks_divmod, [&](int number, int chunk) {
        const int head = int(divide(number, p.len_divmod)), row = number - head * int(p.len_divmod.divisor);
        const GlobalTile q = slice(p.q, here.batch, head, row, row + 1, p.dim), q_out = slice(p.q_out, here.batch, head, row, row + 1, p.dim);
        const i64 place = min_of(length, i64(p.positions_end)) + row;  // of a length beyond all positions, it does not wrap
        rotate_chunk(p, q_out, q, chunk, p.positions.data ? position_of(p, here.batch, row) : place);
      });
      return;
    }
  }
  const i64 count = p.seqlens_new.data ? read(p.seqlens_new, here.batch) : i64(p.len_divmod.divisor);
  for_chunks(here.row, p.rows, p.k_chunks_divmod, [&](int number, int chunk) {
    const NewRow row = new_row(p, here, number, length, count);
    if (!row.exists) return;
    const GlobalTile k = slice(p.k, here.batch, row.head, row.from, row.from + 1, p.dim);
    const GlobalTile k_cache = slice(p.k_cache, row.page, row.head, row.to, row.to + 1, p.dim);
    rotate_chunk(p, k_cache, k, chunk, p.positions.data ? position_of(p, here.batch, row.from) : row.place);
  });
  for_chunks(here.row, p.rows, p.v_chunks_divmod, [&](int number, int chunk) {
    const NewRow row = new_row(p, here, number, length, count);
    if (!row.exists) return;
    const GlobalTile v = slice(p.v, here.batch, row.head, row.from, row.from + 1, p.dim_v);
    copy_chunk(slice(p.v_cache, row.page, row.head, row.to, row.to + 1, p.dim_v), v, chunk);
  });
}
