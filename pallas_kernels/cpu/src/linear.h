// Products with packed weights. Every sum runs over k in order in one accumulator, whatever else is in the batch: a
// row's result does not depend on its neighbours.

constexpr int NV = 2;                 // vectors of columns of a tile
constexpr int64_t kPanel = NV * W;    // columns of a panel
constexpr int64_t STEP = 4 * kPanel;  // bytes of weights of one step
constexpr int REGISTERS = W == 16 ? 32 : 16;
constexpr int SHORT = W == 16 ? 4 : 8;  // steps without a branch, where a step is short

// One step's product: X bytes of x, spread over all lanes, with NV vectors of weights. MOST: rows of a tile, such that
// their accumulators, the weights and one vector of x fit in registers. BLOCK: steps without a branch, which takes a tenth
// of the time of short ones or more.
struct StepF32 {
  using V = vf;
  static constexpr int X = 4, MOST = (REGISTERS - NV - 1) / NV, BLOCK = SHORT;
  static void load(const char* w, vf (&b)[NV]) {
    for (int j = 0; j < NV; ++j) b[j] = load_as<vf>(w + 4 * W * j);
  }
  static void add(const char* x, const vf (&b)[NV], vf (&acc)[NV]) {
    const vf a = splat(load_as<float>(x));
    for (int j = 0; j < NV; ++j) acc[j] += a * b[j];
  }
};

#if defined(__AVX512BF16__)
struct StepBF16 {
  using V = vf;
  static constexpr int X = 4, MOST = StepF32::MOST, BLOCK = SHORT;
  static void load(const char* w, vf (&b)[NV]) { StepF32::load(w, b); }
  static void add(const char* x, const vf (&b)[NV], vf (&acc)[NV]) {
    const __m512i a = _mm512_set1_epi32(load_as<int32_t>(x));
    for (int j = 0; j < NV; ++j) acc[j] = (vf)_mm512_dpbf16_ps((__m512)acc[j], (__m512bh)a, (__m512bh)b[j]);
  }
};
#else
// Pairs of weights are made floats here, once for all rows of a tile; x is floats already, for a value of it is used
// only NV times in a tile. One register holds the mask.
struct StepBF16 {
  using V = vf;
  static constexpr int X = 8, MOST = (REGISTERS - 2 * NV - 2) / NV, BLOCK = 1;
  static void load(const char* w, vf (&b)[NV]) { StepF32::load(w, b); }
  static void add(const char* x, const vf (&b)[NV], vf (&acc)[NV]) {
    const vf even = splat(load_as<float>(x)), odd = splat(load_as<float>(x + 4));
    for (int j = 0; j < NV; ++j) {
      acc[j] += even * (vf)((vi)b[j] << 16);
      acc[j] += odd * (vf)((vi)b[j] & int32_t(0xffff0000));
    }
  }
};
#endif

// Weights are int8, x is uint8 (see `quantize_row`), sums are int32.
struct StepI8 {
  using V = vi;
  static constexpr int X = 4, MOST = (REGISTERS - NV - 1) / (2 * NV), BLOCK = SHORT;  // sums of a group, and of all
  static void load(const char* w, vi (&b)[NV]) {
    for (int j = 0; j < NV; ++j) b[j] = load_as<vi>(w + 4 * W * j);
  }
  static void add(const char* x, const vi (&b)[NV], vi (&acc)[NV]) {
    const int32_t four = load_as<int32_t>(x);
    for (int j = 0; j < NV; ++j) acc[j] = add_products(acc[j], four, b[j]);
  }

 private:
  static vi add_products(vi acc, int32_t x, vi w) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32(x), (__m512i)w);
#else
    // Bytes 0 and 2, then 1 and 3, as pairs of 16 bits.
    const int32_t even = x & 0x00ff00ff, odd = x >> 8 & 0x00ff00ff;
#if defined(__AVX512F__)
    const __m512i low = _mm512_srai_epi16(_mm512_slli_epi16((__m512i)w, 8), 8), high = _mm512_srai_epi16((__m512i)w, 8);
    return acc + (vi)_mm512_madd_epi16(low, _mm512_set1_epi32(even)) +
           (vi)_mm512_madd_epi16(high, _mm512_set1_epi32(odd));
#elif defined(__AVX2__)
    const __m256i low = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)w, 8), 8), high = _mm256_srai_epi16((__m256i)w, 8);
    return acc + (vi)_mm256_madd_epi16(low, _mm256_set1_epi32(even)) +
           (vi)_mm256_madd_epi16(high, _mm256_set1_epi32(odd));
#else
    return acc + (w << 24 >> 24) * (even & 0xffff) + (w << 16 >> 24) * (odd & 0xffff) +
           (w << 8 >> 24) * (even >> 16) + (w >> 24) * (odd >> 16);
#endif
#endif
  }
};

// Memory that is read later is fetched while tiles are multiplied, so many lines a block of steps, so many bytes apart:
// no line twice if there are few tiles, for fetching what is under way already would cost as much as a load.
struct Fetching {
  int64_t lines, apart;
};

constexpr int64_t LINE = 64;
template <class Step>
constexpr int64_t kFetched = Step::BLOCK * STEP;  // bytes a block of steps

// Such that all tiles over one panel together fetch another one.
template <class Step>
inline Fetching share_fetching(int64_t tiles) {
  const int64_t lines = (kFetched<Step> + tiles * LINE - 1) / (tiles * LINE);
  return {lines, (kFetched<Step> + tiles * lines - 1) / (tiles * lines)};
}

// Not by an initializer, which the compiler writes to memory first.
template <class V, int M>
inline void clear(V (&acc)[M][NV]) {
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < NV; ++j) acc[i][j] = V{};
  }
}

template <class Step, int M>
inline __attribute__((always_inline)) void add_step(const char* x, int64_t stride, const char* w,
                                                    typename Step::V (&acc)[M][NV]) {
  typename Step::V b[NV];
  Step::load(w, b);
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) Step::add(x + i * stride, b, acc[i]);
}

// acc [M][NV] += M rows of x (stride bytes apart) times a panel, over `steps`. Meanwhile fetches memory at
// `ahead`, which is moved on.
template <class Step, int M>
inline void multiply_tile(int64_t steps, const char* x, int64_t stride, const char* w,
                          typename Step::V (&acc)[M][NV], const char*& ahead, Fetching fetching) {
  constexpr int BLOCK = Step::BLOCK;
  const int64_t lines = kFetched<Step> <= LINE ? 1 : fetching.lines;  // as `share_fetching` says, without a loop
  int64_t s = 0;
  for (; s + BLOCK <= steps; s += BLOCK) {
    for (int64_t i = 0; i < lines; ++i, ahead += fetching.apart) __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 8
    for (int u = 0; u < BLOCK; ++u) add_step<Step, M>(x + Step::X * (s + u), stride, w + (s + u) * STEP, acc);
  }
  for (; s < steps; ++s) add_step<Step, M>(x + Step::X * s, stride, w + s * STEP, acc);
}

// out [rows][kPanel] = rows of x times one panel.
template <class Step, int M>
void multiply_rows(int64_t steps, const char* x, int64_t stride, const float*, const char* panel, float* out,
                   const char* ahead, Fetching fetching) {
  vf acc[M][NV];
  clear(acc);
  multiply_tile<Step, M>(steps, x, stride, panel, acc, ahead, fetching);
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < NV; ++j) store(out + i * kPanel + j * W, acc[i][j]);
  }
}

inline int64_t count_groups(int64_t steps) { return (steps + kGroup - 1) / kGroup; }

// The same for an int8 panel; scales [rows][groups] are those of x.
template <int M>
void multiply_int8_rows(int64_t steps, const char* x, int64_t stride, const float* scales, const char* panel, float* out,
                        const char* ahead, Fetching fetching) {
  const int64_t groups = count_groups(steps);
  const char* units = panel + (groups + steps) * STEP;
  vf total[M][NV];
  clear(total);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t first = g * kGroup, count = std::min(kGroup, steps - first);
    const char* at = panel + g * (kGroup + 1) * STEP;
    vi acc[M][NV];
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) StepI8::load(at, acc[i]);
    multiply_tile<StepI8, M>(count, x + StepI8::X * first, stride, at + STEP, acc, ahead, fetching);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const vf scale = splat(scales[i * groups + g]);
      for (int j = 0; j < NV; ++j) total[i][j] += __builtin_convertvector(acc[i][j], vf) * scale;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < NV; ++j) store(out + i * kPanel + j * W, total[i][j] * load_as<vf>(units + 4 * j * W));
  }
}

using MultiplyRows = void (*)(int64_t, const char*, int64_t, const float*, const char*, float*, const char*, Fetching);

template <class Step, int... M>
MultiplyRows pick_rows(int rows, std::integer_sequence<int, M...>) {
  if constexpr (std::is_same_v<Step, StepI8>) {
    static constexpr MultiplyRows table[] = {&multiply_int8_rows<M + 1>...};
    return table[rows - 1];
  } else {
    static constexpr MultiplyRows table[] = {&multiply_rows<Step, M + 1>...};
    return table[rows - 1];
  }
}

template <class Step>
MultiplyRows pick_rows(int rows) {
  return pick_rows<Step>(rows, std::make_integer_sequence<int, Step::MOST>());
}

// x scaled to unit root mean square times weight, as stored; n values. A scaled row is what the layer before would
// have stored: it is rounded to S.
template <class S>
void normalize_row(typename S::T* out, const typename S::T* x, const typename S::T* weight, int64_t n, float eps) {
  vf squares{};
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    const vf v = S::load(x + i);
    squares += v * v;
  }
  if (i < n) {
    const vf v = load_part<S>(x + i, n - i);
    squares += v * v;
  }
  const float factor = 1.0f / std::sqrt(sum(squares) / float(n) + eps);
  alignas(64) float scaled[W];
  for (i = 0; i < n; i += W) {
    const int64_t count = std::min<int64_t>(W, n - i);
    const vf v = count == W ? S::load(x + i) : load_part<S>(x + i, count);
    const vf w = count == W ? S::load(weight + i) : load_part<S>(weight + i, count);
    store(scaled, v * factor * w);
    store_as<S>(out + i, scaled, count);
  }
}

// n floats in 8 bits: x is about scale * (out - 128). Returns the scale, that of the largest value to 127, or NaN where
// one is not finite.
inline float quantize_row(uint8_t* out, const float* x, int64_t n) {
  vf tops{}, zeros{};
  int64_t i = 0;
  const auto look = [&](vf v) {
    tops = max(tops, v < 0.0f ? -v : v);
    zeros += v * 0.0f;
  };
  for (; i + W <= n; i += W) look(load_as<vf>(x + i));
  if (i < n) look(load_part<F32>(x + i, n - i));
  const float top = largest(tops);
  if (sum(zeros) != 0.0f) {
    std::fill(out, out + n, 128);
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float up = top > 0 ? 127.0f / top : 0.0f;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, left in the low bits
  for (i = 0; i < n; i += W) {
    const int64_t count = std::min<int64_t>(W, n - i);
    const vf v = count == W ? load_as<vf>(x + i) : load_part<F32>(x + i, count);
    const vi whole = (vi)(v * up + magic) - 0x4b400000 + 128;
    const vb bytes = __builtin_convertvector(whole, vb);
    std::memcpy(out + i, &bytes, count);
  }
  return top / 127.0f;
}

// out [kPanel] += in [kPanel]
inline void add_panel(float* out, const float* in) {
  for (int64_t c = 0; c < kPanel; c += W) store(out + c, load_as<vf>(out + c) + load_as<vf>(in + c));
}

template <class S>
void add_bias(const Linear& a, float* sums, int64_t rows, int64_t column, int64_t n) {
  alignas(64) float bias[kPanel] = {};
  load_floats<S>(bias, static_cast<const typename S::T*>(a.bias) + column, n);
  for (int64_t i = 0; i < rows; ++i) add_panel(sums + i * kPanel, bias);
}

// Bias, gate, residual, and the change of type, for some rows of one panel. sums, ups f32[rows][kPanel].
template <class S, class Y>
void finish_rows(const Linear& a, int64_t row, int64_t rows, int64_t column, float* sums, float* ups) {
  const int64_t n = std::min(kPanel, a.n - column);
  if (a.bias) {
    add_bias<S>(a, sums, rows, column, n);
    if (ups) add_bias<S>(a, ups, rows, a.n + column, n);
  }
  for (int64_t i = 0; i < rows; ++i) {
    float* line = sums + i * kPanel;
    if (ups) {
      for (int64_t c = 0; c < kPanel; c += W) {
        store(line + c, silu(load_as<vf>(line + c)) * load_as<vf>(ups + i * kPanel + c));
      }
    }
    if (a.residual) {  // added to what would be stored without it, so that it makes no difference who adds it
      if constexpr (!std::is_same_v<Y, F32>) {
        typename Y::T rounded[kPanel];
        store_as<Y>(rounded, line, n);
        load_floats<Y>(line, rounded, n);
      }
      alignas(64) float other[kPanel] = {};
      load_floats<Y>(other, static_cast<const typename Y::T*>(a.residual) + (row + i) * a.n + column, n);
      add_panel(line, other);
    }
    for (int64_t p = 0, first = 0; p < a.parts; first += a.widths[p++]) {
      const int64_t begin = std::max(column, first), end = std::min(column + n, first + a.widths[p]);
      if (begin >= end) continue;
      auto* y = static_cast<typename Y::T*>(a.y[p]) + (row + i) * a.widths[p] + begin - first;
      store_as<Y>(y, line + begin - column, end - begin);
    }
  }
}

template <class S, class Step, class Y>
void linear_of(const Linear& a, const Pool& pool) {
  using T = typename S::T;
  constexpr bool quantized = std::is_same_v<Step, StepI8>;
  constexpr bool widened = Step::X == 8, converted = quantized || widened;
  constexpr int64_t per_step = quantized ? 4 : 4 / sizeof(T);
  const int64_t steps = (a.k + per_step - 1) / per_step;
  const int64_t panels = (a.n + kPanel - 1) / kPanel;
  if (a.live == 0) return;

  // Rows of x as the tiles read them: normalised, quantised or made floats, and filled up to whole steps.
  const char* x = static_cast<const char*>(a.x);
  const int64_t groups_of_x = quantized ? count_groups(steps) : 0;  // each has a scale
  std::unique_ptr<char[]> rows;
  std::unique_ptr<float[]> scales;
  const int64_t stride = steps * Step::X;
  if (converted || a.norm || a.k % per_step) {
    rows.reset(new char[a.live * stride]);
    if (quantized) scales.reset(new float[a.live * groups_of_x]);
    const int64_t chunk = 8;
    pool.run((a.live + chunk - 1) / chunk, [&](int64_t i, int64_t) {
      std::unique_ptr<T[]> scaled(converted && a.norm ? new T[a.k] : nullptr);
      std::unique_ptr<float[]> floats(quantized ? new float[a.k] : nullptr);
      for (int64_t r = i * chunk; r < std::min(a.live, (i + 1) * chunk); ++r) {
        char* to = rows.get() + r * stride;
        const T* from = static_cast<const T*>(a.x) + r * a.k;
        if (a.norm) {
          T* norm_to = converted ? scaled.get() : reinterpret_cast<T*>(to);
          normalize_row<S>(norm_to, from, static_cast<const T*>(a.norm), a.k, a.eps);
          from = norm_to;
        }
        if (quantized) {
          load_floats<S>(floats.get(), from, a.k);
          for (int64_t g = 0; g < groups_of_x; ++g) {
            const int64_t begin = g * kGroup * 4, count = std::min(kGroup * 4, a.k - begin);
            auto* bytes = reinterpret_cast<uint8_t*>(to) + begin;
            scales[r * groups_of_x + g] = quantize_row(bytes, floats.get() + begin, count);
          }
        } else if (widened) {
          load_floats<S>(reinterpret_cast<float*>(to), from, a.k);
        } else if (!a.norm) {
          std::memcpy(to, from, a.k * sizeof(T));
        }
        const int64_t filled = a.k * Step::X / per_step;
        std::memset(to + filled, 0, stride - filled);
      }
    });
    x = rows.get();
  }

  // A task is some neighbouring panels for some rows: enough tasks to share out, each long enough to be worth taking.
  const int64_t few = pool.threads * 4;
  int64_t row_parts = std::max<int64_t>(1, std::min((few + panels - 1) / panels, a.live / (4 * Step::MOST)));
  const int64_t part = (a.live + row_parts - 1) / row_parts;
  row_parts = (a.live + part - 1) / part;
  const int64_t group = std::max<int64_t>(1, panels / (pool.threads * 64));
  const int64_t groups = (panels + group - 1) / group;
  const int64_t halves = a.gated ? 2 : 1;
  const int64_t panel_bytes = (steps + (quantized ? groups_of_x + 1 : 0)) * STEP;
  const char* weight = static_cast<const char*>(a.weight);

  pool.run(groups * row_parts, [&](int64_t task, int64_t next) {
    alignas(64) float sums[2][Step::MOST * kPanel];
    const int64_t first = task % groups * group, last = std::min(panels, first + group);
    const int64_t row_begin = task / groups * part, row_end = std::min(a.live, row_begin + part);
    const int64_t tiles = (row_end - row_begin + Step::MOST - 1) / Step::MOST;
    const Fetching fetching = share_fetching<Step>(tiles);
    for (int64_t p = first; p < last; ++p) {
      const char* panel = weight + p * halves * panel_bytes;
      // What this thread reads after this panel, fetched by all the tiles of this one in turn.
      const int64_t after = p + 1 < last ? p + 1 : next < 0 ? p : next % groups * group;
      const char* ahead = weight + after * halves * panel_bytes;
      int64_t row = row_begin;
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t count = (row_end - row + tiles - t - 1) / (tiles - t);
        const MultiplyRows multiply = pick_rows<Step>(int(count));
        for (int64_t h = 0; h < halves; ++h) {
          multiply(steps, x + row * stride, stride, scales.get() + row * groups_of_x, panel + h * panel_bytes, sums[h],
                   ahead + h * panel_bytes + t * panel_bytes / tiles, fetching);
        }
        finish_rows<S, Y>(a, row, count, p * kPanel, sums[0], a.gated ? sums[1] : nullptr);
        row += count;
      }
    }
  });
}

void linear(const Linear& a, const Pool& pool) {
  const bool quantized = a.weight_type == Type::i8;
  if (a.type == Type::f32) {
    quantized ? linear_of<F32, StepI8, F32>(a, pool) : linear_of<F32, StepF32, F32>(a, pool);
  } else if (a.y_type == Type::f32) {
    quantized ? linear_of<BF16, StepI8, F32>(a, pool) : linear_of<BF16, StepBF16, F32>(a, pool);
  } else {
    quantized ? linear_of<BF16, StepI8, BF16>(a, pool) : linear_of<BF16, StepBF16, BF16>(a, pool);
  }
}

// Rows of an int8 weight in their own units.
template <class S>
void take_int8_rows(const TakeRows& a, const Pool& pool) {
  const int64_t steps = (a.k + 3) / 4, groups = count_groups(steps), chunk = 16;
  pool.run((a.rows + chunk - 1) / chunk, [&](int64_t i, int64_t) {
    for (int64_t r = i * chunk; r < std::min(a.rows, (i + 1) * chunk); ++r) {
      const int64_t id = std::min<int64_t>(std::max<int64_t>(a.ids[r], 0), a.n - 1);
      const char* from = static_cast<const char*>(a.weight) + id / kPanel * (steps + groups + 1) * STEP + id % kPanel * 4;
      const float scale = load_as<float>(from + (steps + groups) * STEP);
      auto* to = static_cast<typename S::T*>(a.out) + r * a.k;
      for (int64_t s = 0; s < steps; ++s) {
        const char* four = from + (s + s / kGroup + 1) * STEP;
        for (int64_t c = 4 * s; c < std::min(4 * s + 4, a.k); ++c) to[c] = S::put(int8_t(four[c % 4]) * scale);
      }
    }
  });
}

template <class T>
void take_rows_of(const TakeRows& a, const Pool& pool) {
  constexpr int64_t per_step = 4 / sizeof(T);
  const int64_t steps = (a.k + per_step - 1) / per_step, chunk = 16;
  pool.run((a.rows + chunk - 1) / chunk, [&](int64_t i, int64_t) {
    for (int64_t r = i * chunk; r < std::min(a.rows, (i + 1) * chunk); ++r) {
      const int64_t id = std::min<int64_t>(std::max<int64_t>(a.ids[r], 0), a.n - 1);
      const char* from = static_cast<const char*>(a.weight) + id / kPanel * steps * STEP + id % kPanel * 4;
      char* to = static_cast<char*>(a.out) + r * a.k * sizeof(T);
      for (int64_t s = 0; s < steps; ++s) {
        const int64_t bytes = std::min<int64_t>(4, (a.k - s * per_step) * sizeof(T));
        std::memcpy(to + 4 * s, from + s * STEP, bytes);
      }
    }
  });
}

void take_rows(const TakeRows& a, const Pool& pool) {
  if (a.weight_type == Type::i8) {
    a.type == Type::f32 ? take_int8_rows<F32>(a, pool) : take_int8_rows<BF16>(a, pool);
  } else {
    a.type == Type::f32 ? take_rows_of<float>(a, pool) : take_rows_of<uint16_t>(a, pool);
  }
}
