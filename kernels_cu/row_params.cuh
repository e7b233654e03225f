// row_params.cuh -- what kernels are told that take rows from one array to another, as in params.cuh.
#pragma once
#include "params.cuh"

// Integers that belong to batch elements, or to rows of these.
struct Indices {
  const void* data;                       // null: there are none
  i64 batch_stride[BATCH_AXES];
  i64 row_stride;
  int wide;                               // whether they have 64 bits, and not 32
};

// By which angles the pairs of elements of rows are rotated, see tile/rotation.cuh.
struct RotationParams {
  Tensor cos, sin;                        // (positions, pairs)
  Indices positions;                      // (*batch)  of the first row, the next row being at the next position; or (*batch, rows)
  int position_of_each;                   // whether positions are those of each row
  int pairs;                              // of a row: so many that twice as many elements are rotated, and those behind them are copied; 0 rotates none
  int positions_end;                      // positions that there are angles of
  int interleaved;                        // whether partners are neighbours, and not `pairs` apart
  int float32_angles;                     // whether cos and sin are float32, and not in the dtype of the rows
  int in_fours;                           // whether granules of them can be read 16 bytes at a time
};
struct RotateParams : RotationParams {
  Tensor x, out;                          // (*batch, heads, len, dim)
  i64 first_position;                     // of the first row, if there are no positions
  int batch[BATCH_AXES];
  int rows;                               // heads * len
  int dim;
  FastDivmod len_divmod;
  FastDivmod chunks_divmod;               // of a row
};

// New rows of keys and values, and the caches that they are written into.
struct AppendParams : RotationParams {
  Tensor k;                               // (*batch, heads, len, dim)
  Tensor v;                               // (*batch, heads, len, dim_v)
  Tensor k_cache;                         // (page_count, heads, page size, dim)    with a sequence in each page, if there is no table of them
  Tensor v_cache;                         // (page_count, heads, page size, dim_v)
  Indices seqlens;                        // (*batch)  rows that are there
  Indices seqlens_new;                    // (*batch)  of `len` the first ones that are appended, or null: all
  Indices pages;                          // (*batch, pages)  numbers of pages, or null: one for each batch element
  Indices cache_batch_idx;                // (*batch)  its number then, or null: that of the batch element
  i64 length;                             // of all batch elements, if there are no seqlens
  int batch[BATCH_AXES];
  int rows;                               // heads * len
  int dim;
  int dim_v;
  int page_count;
  int capacity;                           // rows of a sequence that there are places for
  FastDivmod len_divmod;
  FastDivmod page_divmod;                 // rows of a page
  FastDivmod k_chunks_divmod;             // of a row, of q too
  FastDivmod v_chunks_divmod;
  Tensor q, q_out;                        // (*batch, heads of q, len, dim)
  int q_first;                            // rows, and what is left of a block: rows of q are counted from here on
  int q_rows;                             // heads of q * len
};

// The heads of q, k or v. Axes along which the array stays where it is have size 1.
struct OperandHeads {
  int batch[BATCH_AXES];                  // VARLEN: not asked
  int heads, rows, dim;
  int columns;                            // of a part, a multiple of 64
  int rows_of_block;
  int blocks_of_head;
  int first_block;                        // of the array
  int first_head;
};

// float32 operands, and what becomes of them, see fp16_parts.cu.
constexpr int OPERANDS = 4;
struct Fp16PartsParams {
  Tensor q;                               // (*batch, heads,    len_q,  dim)
  Tensor k;                               // (*batch, heads_kv, len_kv, dim)
  Tensor v;                               // (*batch, heads_kv, len_kv, dim_v)
  Tensor dout;                            // (*batch, heads,    len_q,  dim_v)  for gradients; without rows for a forward
  u16* q_parts;                           // (heads of q, len_q, FP16_PARTS, columns)  float16
  u16* k_parts;                           // the same of k
  u16* v_parts;                           // and of v
  u16* dout_parts;                        // and of dout
  float* largest;                         // (blocks, WARPS)  the largest magnitude among the rows of each warp
  int* exponents;                         // (heads of q, of k, of v, and of dout)  by which their parts were made at first
  float* factors;                         // (batch, heads, factors_of_head)  as HeadFactors, or for gradients GradientFactors
  OperandHeads of[OPERANDS];
  int batch[BATCH_AXES];
  int heads;
  int heads_per_kv;                       // query heads that share one key-value head
  int all_heads;                          // of all batch elements; VARLEN: of all sequences, and of rows behind all
  int first_of_factors;                   // block
  int factors_of_head;
  int len_q, len_kv;
  SequenceParams sequences;               // VARLEN: rows that are no queries, or keys, have no parts
};
