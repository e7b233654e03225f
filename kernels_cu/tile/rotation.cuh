// rotation.cuh -- rows on their way from one array to another, rotated in pairs of elements as they pass.
#pragma once
#include "tile/copy.cuh"

// A lane moves a chunk of a row at a time: two granules that hold pairs of elements, or behind these one that is copied as it is.
//
//   halves         element i is paired with i + pairs       granules at c and at pairs + c
//   interleaved    element 2i is paired with 2i + 1         granules at 2c and next to it
//
// A chunk has all elements of its pairs, and no other lane reads them, so rows may be rotated where they are. The planner picks COPY_BYTES so
// that `pairs` is a multiple of GRANULE.

// an integer of a batch element, or of one of its rows
OP i64 read(const Indices& x, const int (&batch)[BATCH_AXES], int row = 0) {
  i64 offset = row * x.row_stride;
  #pragma unroll
  for (int i = 0; i < BATCH_AXES; ++i) offset += batch[i] * x.batch_stride[i];
  count_read(x.wide ? 8 : 4);
  return x.wide ? static_cast<const i64*>(x.data)[offset] : static_cast<const int*>(x.data)[offset];
}

// where in its sequence a row is, or beyond all positions that have angles
OP i64 position_of(const RotationParams& p, const int (&batch)[BATCH_AXES], int row) {
  const i64 position = read(p.positions, batch, row);
  return p.position_of_each ? position : min_of(position, i64(p.positions_end)) + row;
}

// For the rows first ... of a tile, shared by the threads of a block: use(row, chunk) for each chunk of each of them.
template <typename Use> OP void for_chunks(int first, int rows, const FastDivmod& chunks, Use use) {
  const u32 count = u32(min_of(TILE_Q, rows - first)) * chunks.divisor;
  for (u32 start = warp_id() * 32; start < count; start += Block::threads) {
    for_lane(l) {
      const u32 number = start + l, row = divide(number, chunks);
      if (number < count) use(first + int(row), int(number - row * chunks.divisor));
    }
  }
}

// to = the numbers of `angles`, cos or sin, of a position and of so many pairs from `pair` on
template <int N> OP void read_angles(float (&to)[N], const RotationParams& p, const Tensor& angles, int position, int pair) {
  const i64 offset = position * angles.row_stride + pair * angles.col_stride;
  if constexpr (N % 4 == 0) {
    if (p.in_fours) {
      #pragma unroll
      for (int i = 0; i < N; i += 4) {
        count_read(16);
        const Vector<16> four = *reinterpret_cast<const Vector<16>*>(static_cast<const float*>(angles.data) + offset + i);
        #pragma unroll
        for (int j = 0; j < 4; ++j) to[i + j] = bits_float(four.words[j]);
      }
      return;
    }
  }
  #pragma unroll
  for (int i = 0; i < N; ++i) {
    const i64 at = offset + i * angles.col_stride;
    if (p.float32_angles) {
      to[i] = read(static_cast<const float*>(angles.data) + at);
    } else {
      count_read(sizeof(Element));
      to[i] = to_float(static_cast<const Element*>(angles.data)[at]);
    }
  }
}

// The pairs (x[STEP i], x[STEP i + APART]) rotated by so many angles.
template <int STEP, int APART, int N> OP void rotate_pairs(float (&x)[2 * N], const float (&cos)[N], const float (&sin)[N]) {
  #pragma unroll
  for (int i = 0; i < N; ++i) {
    const float a = x[STEP * i], b = x[STEP * i + APART];
    x[STEP * i] = fmaf(a, cos[i], -(b * sin[i]));
    x[STEP * i + APART] = fmaf(b, cos[i], a * sin[i]);
  }
}

// GRANULE numbers, rounded
template <int BYTES> OP void pack_granule(Vector<BYTES>& granule, const float* x) {
  if constexpr (BYTES == 0) {
    granule.element = from_float<Element>(x[0]);
  } else {
    #pragma unroll
    for (int i = 0; i < BYTES / 4; ++i) {
      if constexpr (sizeof(Element) == 4) granule.words[i] = float_bits(x[i]);
      else granule.words[i] = pack<Element>(x[2 * i], x[2 * i + 1]);
    }
  }
}

OP Granule read_granule(const GlobalTile& row, int col) {
  count_read(sizeof(Granule));
  return *reinterpret_cast<const Granule*>(row.at(0, col));
}
OP void write_granule(const GlobalTile& row, int col, const Granule& granule) {
  count_written(sizeof(Granule));
  *reinterpret_cast<Granule*>(row.at(0, col)) = granule;
}

// One row's chunk: to = from
OP void copy_chunk(const GlobalTile& to, const GlobalTile& from, int chunk) { write_granule(to, chunk * GRANULE, read_granule(from, chunk * GRANULE)); }

// The same, rotated by the angles of a position, the nearest that there is, where the chunk has any.
OP void rotate_chunk(const RotationParams& p, const GlobalTile& to, const GlobalTile& from, int chunk, i64 position) {
  const int pair = chunk * GRANULE;
  if (pair >= p.pairs) {
    const int col = pair + p.pairs;
    write_granule(to, col, read_granule(from, col));
    return;
  }
  const int near = int(max_of(min_of(position, i64(p.positions_end - 1)), i64(0)));
  const int first = p.interleaved ? 2 * pair : pair, second = p.interleaved ? first + GRANULE : pair + p.pairs;
  Granule low = read_granule(from, first), high = read_granule(from, second);
  float x[2 * GRANULE], cos[GRANULE], sin[GRANULE];
  #pragma unroll
  for (int i = 0; i < GRANULE; ++i) x[i] = element_of(low, i), x[GRANULE + i] = element_of(high, i);
  read_angles(cos, p, p.cos, near, pair);
  read_angles(sin, p, p.sin, near, pair);
  if (p.interleaved) rotate_pairs<2, 1>(x, cos, sin);
  else rotate_pairs<1, GRANULE>(x, cos, sin);
  pack_granule(low, x);
  pack_granule(high, x + GRANULE);
  write_granule(to, first, low);
  write_granule(to, second, high);
}
