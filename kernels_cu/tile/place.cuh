// place.cuh -- which part of the problem a block works on.
#pragma once
#include "params.cuh"

template <bool, typename A, typename B> struct ChooseType { typedef A type; };
template <typename A, typename B> struct ChooseType<false, A, B> { typedef B type; };
template <bool FIRST, typename A, typename B> using Choose = typename ChooseType<FIRST, A, B>::type;

struct Place {
  int batch[BATCH_AXES];
  int head;
  int row;                                                    // first query row
};

// Blocks in launch order: tiles of a head, heads, batch. Neighbours share K and V in the L2 cache. The last tile of a head comes
// first, because under a causal mask it is the longest and the short ones fill the gaps at the end.
OP Place place_of_block(const int (&batch)[BATCH_AXES], int heads, int len_q, int tile_q) {
  const u32 tiles = ceil_div(len_q, tile_q);
  u32 rest = block_id();
  Place here;
  here.row = int(tiles - 1 - rest % tiles) * tile_q;
  rest /= tiles;
  here.head = int(rest % heads);
  rest /= heads;
  #pragma unroll
  for (int i = BATCH_AXES - 1; i >= 0; --i) {
    here.batch[i] = 0;
    if (batch[i] > 1) {                                       // divisions are slow, and most problems have one batch axis
      here.batch[i] = int(rest % batch[i]);
      rest /= batch[i];
    }
  }
  return here;
}
