// What the kernels of every instruction set offer, and their arguments. Plain data: no XLA in here.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace jpaged {

enum class Type { f32, bf16, f16, i8, fp8 };

// A weight [N, K] is packed as [ceil(N / P), ceil(K / v), P, v] where v values fill four bytes (1 float, 2 bfloat16,
// 4 int8) and P, the columns of a panel, are those that the instruction set computes at once; rows and columns beyond N
// and K are zeros. So a panel is one stream of memory, and one step of a product takes 4 P bytes of it and four bytes of
// each row of x. In an int8 panel each kGroup steps are led by one of P int32, -128 times the sum of the integers of each
// row in them, and the last step is followed by one of P f32, what a row's integers are multiplied with.
constexpr int64_t kGroup = 16;  // steps

constexpr int64_t kMostParts = 3;  // of a product's outputs

// y [rows, n] = norm(x) [rows, k] times weight [n, k] transposed, + bias, + residual.
struct Linear {
  int64_t rows, n, k;
  int64_t live;          // rows from here on are padding: y is not written there
  Type type;             // of x, norm, bias, residual
  Type weight_type;      // that or i8: rows of x are then rounded to 8 bits too, a scale for each kGroup steps
  Type y_type;           // `type` or f32
  const void* x;         // [rows, k]
  const void* weight;    // packed
  const void* norm;      // [k], or null: x is first scaled to unit root mean square, times this
  float eps;             // of the norm
  const void* bias;      // [n] ([2 n]: gates, then ups, if gated), or null
  const void* residual;  // [rows, n] in y's type, or null
  bool gated;            // weight has 2 n rows, panel by panel a gate and what it multiplies: y = silu(gate) * up
  int64_t parts;         // arrays that y is in, from its first column to its last; one where there is a residual
  int64_t widths[kMostParts];
  void* y[kMostParts];   // [rows, width] each
};

// out [rows, k] = rows `ids` of a packed weight [n, k]; ids outside are clipped.
struct TakeRows {
  int64_t rows, n, k;
  Type type;         // of out
  Type weight_type;  // that or i8
  const void* weight;
  const int32_t* ids;  // [rows]
  void* out;
};

// The pages of one layer. [N, Hkv, B, D] each; scales f32 [N, Hkv, B] where the type is i8 or fp8, else null.
struct Pages {
  int64_t blocks, heads, block_size, head_dim;
  Type type;
  void* k;
  void* v;
  float* k_scales;
  float* v_scales;
};

struct Attention {
  Pages pages;
  Type q_type;
  int64_t rows, heads;         // T, Hq
  const void* q;               // [T, Hq, D]
  int64_t sequences, columns;  // R, M
  const int32_t* tables;       // [R, M]
  const int32_t* lengths;      // [R]
  const int32_t* starts;       // [R + 1], or null: one row a sequence
  const float* sinks;          // [Hq], or null
  float scale;
  int64_t window;  // 0: none
  float soft_cap;  // 0: none
  void* out;       // [T, Hq, D] of q_type
  float* lse;      // [T, Hq], or null
};

// Stores rows of k and v [T, Hkv, D] at slots [T]; a slot outside the pool is dropped. With cos and sin [T, D / 2], q and k
// are rotated first: dimension i turns with i + D / 2. Rows that go to block 0 are padding: their q is not written.
struct Write {
  Pages pages;
  Type type;  // of q, k, v and q_out
  int64_t rows;
  const void* k;
  const void* v;
  const int32_t* slots;
  int64_t q_heads;   // 0: no q
  const void* q;     // [T, Hq, D]
  const float* cos;  // or null
  const float* sin;
  void* q_out;  // [T, Hq, D]
};

struct Kernels {
  const char* name;
  int64_t panel;  // columns of a packed weight's panel
  void (*linear)(const Linear&, const Pool&);
  void (*take_rows)(const TakeRows&, const Pool&);
  void (*attention)(const Attention&, const Pool&);
  void (*write)(const Write&, const Pool&);
};

}  // namespace jpaged
