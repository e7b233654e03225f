// params.cuh -- what a kernel is told at launch: one struct per kernel family, passed by value.
// launch.py mirrors each struct with a NumPy dtype; a test compares the two field by field.
#pragma once
#include "tile/scope.cuh"

constexpr int BATCH_AXES = 4;             // leading axes that could not be merged; unused ones have size 1 and stride 0

// A strided array (*batch, heads, rows, cols). Strides count elements and may be 0 or negative.
struct Tensor {
  void* data;
  i64 batch_stride[BATCH_AXES];
  i64 head_stride;
  i64 row_stride;
  i64 col_stride;
};

struct ForwardParams {
  Tensor q;                               // (*batch, heads,    len_q,  dim)
  Tensor k;                               // (*batch, heads_kv, len_kv, dim)
  Tensor v;                               // (*batch, heads_kv, len_kv, dim_v)
  Tensor out;                             // (*batch, heads,    len_q,  dim_v)
  Tensor lse;                             // (*batch, heads,    len_q)  float32, or data = null when nobody asked for it
  int first_key;                          // row i sees the keys i + first_key ...
  int last_key;                           // ... to i + last_key, both included; lengths and bounds stay below 2^30
  int batch[BATCH_AXES];
  int heads;
  int heads_per_kv;                       // query heads that share one key-value head
  int len_q;
  int len_kv;
  int dim;
  int dim_v;
  float scale;
  float softcap;                          // scores become softcap * tanh(score / softcap); 0 = no cap
};
