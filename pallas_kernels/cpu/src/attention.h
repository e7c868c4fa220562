// Attention over pages, with an online softmax in float32.
//
// A task is some query rows of one sequence (a token's G query heads of one KV head are G rows), and one part of the keys
// they see. Few rows: dot products with keys where they lie. Many rows: keys and values are first unpacked into
// panels, and both products are those of linear.h. Parts of a long sequence are merged afterwards (flash decoding:
// Dao et al. 2023). The parts are cut by position only: a row's result does not depend on the rest of the batch.

constexpr int64_t TILE = 64;        // keys of one softmax update
constexpr int64_t PART = 512;       // keys of one part
constexpr int64_t FEW_ROWS = 8;     // up to here keys are read where they lie
constexpr int64_t MANY_ROWS = 96;   // at most, in a task

// Rows' softmax so far: largest score, sum of weights, weighted sum of values.
struct Partial {
  float* top;    // [rows]
  float* total;  // [rows]
  float* acc;    // [rows][width]
};

// One task: query rows of some tokens, the first at `position`, for KV heads [head, head + heads), and keys [begin, end).
struct Piece {
  int64_t sequence, head, heads, row, tokens, position, begin, end;
  int64_t partial;  // of its first row among the partial results, or -1: the only part

  int64_t rows(int64_t group) const { return tokens * group; }  // of one head

  // The same for its i-th head alone.
  Piece of_head(int64_t i, int64_t group) const {
    Piece one = *this;
    one.head += i;
    one.heads = 1;
    if (partial >= 0) one.partial += i * rows(group);
    return one;
  }
};

// Floats of one task, on the stack if they fit there: threads that ask the C library for memory wait for each other, which
// takes longer than a short sequence's attention.
class Scratch {
 public:
  explicit Scratch(int64_t n) : far_(n > kNear ? new float[n] : nullptr) {}
  float* get() { return far_ ? far_.get() : near_; }

 private:
  static constexpr int64_t kNear = 16384;
  std::unique_ptr<float[]> far_;
  alignas(64) float near_[kNear];
};

// The geometry all tasks share.
struct Sizes {
  int64_t group, dim, width;  // query heads a KV head; D; D rounded up to whole panels of columns
};

// Whether keys are read where they lie.
inline bool is_few(int64_t tokens, const Sizes& size) { return tokens == 1 || tokens * size.group <= FEW_ROWS; }

// Where the keys and values of positions [at, at + count) of one sequence and head are.
template <class S>
struct Places {
  using T = typename S::T;
  const T* k[TILE];
  const T* v[TILE];
  float k_scale[TILE];
  float v_scale[TILE];

  void find(const Attention& a, const Piece& piece, int64_t at, int64_t count) {
    const Pages& p = a.pages;
    const int32_t* table = a.tables + piece.sequence * a.columns;
    for (int64_t i = 0; i < count;) {
      const int64_t position = at + i, offset = position % p.block_size;
      const int64_t run = std::min(count - i, p.block_size - offset);
      const int64_t block = std::min<int64_t>(std::max<int64_t>(table[position / p.block_size], 0), p.blocks - 1);
      const int64_t token = (block * p.heads + piece.head) * p.block_size + offset;
      for (int64_t j = 0; j < run; ++j) {
        k[i + j] = static_cast<const T*>(p.k) + (token + j) * p.head_dim;
        v[i + j] = static_cast<const T*>(p.v) + (token + j) * p.head_dim;
        if (p.k_scales) {
          k_scale[i + j] = p.k_scales[token + j];
          v_scale[i + j] = p.v_scales[token + j];
        }
      }
      i += run;
    }
  }
};

// Starts to read n values, as far as the second-level cache: the first has no room for a tile more. A burst of these would
// only wait for the memory: they are spread over the work on other keys.
template <class T>
inline void fetch(const T* values, int64_t n) {
  const char* p = reinterpret_cast<const char*>(values);
  for (int64_t b = 0; b < int64_t(n * sizeof(T)); b += 64) __builtin_prefetch(p + b, 0, 2);
}

// Which of the keys [at, at + count) the row at `position` sees: [first, last) counted from `at`.
inline void see(const Attention& a, int64_t position, int64_t at, int64_t count, int64_t* first, int64_t* last) {
  *last = std::max<int64_t>(0, std::min(count, position + 1 - at));
  *first = a.window ? std::min(*last, std::max<int64_t>(0, position - a.window + 1 - at)) : 0;
}

// Turns a row of scores [TILE] into weights and updates its softmax. Keys outside [first, last) get weight 0.
// Returns what the row's sum of values must be multiplied by.
inline float update_softmax(const Attention& a, float* scores, int64_t first, int64_t last, float* top, float* total) {
  if (first >= last) {
    std::memset(scores, 0, TILE * sizeof(float));
    return 1.0f;
  }
  const float low = -std::numeric_limits<float>::infinity();
  if (first > 0) std::fill(scores, scores + first, low);
  if (last < TILE) std::fill(scores + last, scores + TILE, low);
  if (a.soft_cap > 0) {
    for (int64_t t = 0; t < last; t += W) {
      store(scores + t, a.soft_cap * tanh(load_as<vf>(scores + t) * (1.0f / a.soft_cap)));
    }
    if (first > 0) std::fill(scores, scores + first, low);
    if (last < TILE) std::fill(scores + last, scores + TILE, low);
  }
  vf tops = splat(*top);
  for (int64_t t = 0; t < last; t += W) tops = max(tops, load_as<vf>(scores + t));
  const float now = largest(tops);
  vf sums{};
  for (int64_t t = 0; t < TILE; t += W) {
    const vf s = load_as<vf>(scores + t);
    vf weight = exp(s - now);
    weight = s == low ? vf{} : weight;
    sums += weight;
    store(scores + t, weight);
  }
  const float factor = *top == now ? 1.0f : *top == low ? 0.0f : std::exp(*top - now);
  *total = *total * factor + sum(sums);
  *top = now;
  return factor;
}

// ---------------------------------------------------------------- few rows

// out [R][TILE] at 0..3 = R query rows (width apart) times four keys.
template <class S, int R>
inline void score_four(const float* q, int64_t width, const typename S::T* const* k, int64_t dim, float* out) {
  vf acc[R][4] = {};
  int64_t d = 0;
  auto step = [&](const vf(&key)[4]) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf query = load_as<vf>(q + r * width + d);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) acc[r][j] += query * key[j];
    }
  };
  for (; d + W <= dim; d += W) {
    const vf key[4] = {S::load(k[0] + d), S::load(k[1] + d), S::load(k[2] + d), S::load(k[3] + d)};
    step(key);
  }
  if (d < dim) {
    vf key[4];
    for (int j = 0; j < 4; ++j) key[j] = load_part<S>(k[j] + d, dim - d);
    step(key);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sum_four(out + r * TILE, acc[r]);
}

// acc [R][width] at columns [d, d + C * W) = acc * factor + weights [R][TILE] times values.
template <class S, int R, int C>
inline void add_columns(const float* weights, const typename S::T* const* v, int64_t first, int64_t last, int64_t d,
                        const float* factor, float* acc, int64_t width, const typename S::T* const* ahead,
                        int64_t to_fetch) {
  vf sums[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) sums[r][c] = load_as<vf>(acc + r * width + d + c * W) * factor[r];
  }
  for (int64_t t = first; t < last; ++t) {
    if (t - first < to_fetch) fetch(ahead[t - first] + d, C * W);  // as many as there are keys here: about a tile
    vf value[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) value[c] = S::load(v[t] + d + c * W);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf weight = splat(weights[r * TILE + t]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[r][c] += weight * value[c];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store(acc + r * width + d + c * W, sums[r][c]);
  }
}

template <class S, int R>
inline void add_values(const float* weights, const typename S::T* const* v, int64_t first, int64_t last, int64_t dim,
                       const float* factor, float* acc, int64_t width, const typename S::T* const* ahead,
                       int64_t to_fetch) {
  constexpr int C = W == 16 ? 4 : 2;
  int64_t d = 0;
  for (; d + C * W <= dim; d += C * W) {
    add_columns<S, R, C>(weights, v, first, last, d, factor, acc, width, ahead, to_fetch);
  }
  for (; d + W <= dim; d += W) {
    add_columns<S, R, 1>(weights, v, first, last, d, factor, acc, width, ahead, to_fetch);
  }
  for (; d < dim; ++d) {
    for (int r = 0; r < R; ++r) {
      float sum = acc[r * width + d] * factor[r];
      for (int64_t t = first; t < last; ++t) sum += weights[r * TILE + t] * S::get(v[t][d]);
      acc[r * width + d] = sum;
    }
  }
}

// The rows [r, r + R) of a piece against one tile of keys. Meanwhile fetches the first `to_fetch` of the keys and values
// `ahead`.
template <class S, int R>
inline void attend_rows(const Attention& a, const Piece& piece, const Sizes& size, const float* q, int64_t r, int64_t at,
                        int64_t count, const Places<S>& places, const Places<S>& ahead, int64_t to_fetch,
                        const Partial& partial) {
  alignas(64) float scores[R * TILE];
  for (int64_t t = 0; t < count; t += 4) {
    const typename S::T* keys[4];
    for (int64_t j = 0; j < 4; ++j) keys[j] = places.k[std::min(t + j, count - 1)];
    for (int64_t j = t; j < std::min(t + 4, to_fetch); ++j) fetch(ahead.k[j], size.dim);
    score_four<S, R>(q + r * size.width, size.width, keys, size.dim, scores + t);
  }
  float factor[R];
  int64_t from = count, to = 0;  // what any of the rows sees
  for (int i = 0; i < R; ++i) {
    float* line = scores + i * TILE;
    if (a.pages.k_scales) {
      for (int64_t t = 0; t < count; ++t) line[t] *= places.k_scale[t];
    }
    int64_t first, last;
    see(a, piece.position + (r + i) / size.group, at, count, &first, &last);
    factor[i] = update_softmax(a, line, first, last, partial.top + r + i, partial.total + r + i);
    if (first < last) {
      from = std::min(from, first);
      to = std::max(to, last);
    }
    if (a.pages.v_scales) {
      for (int64_t t = first; t < last; ++t) line[t] *= places.v_scale[t];
    }
  }
  add_values<S, R>(scores, places.v, from, to, size.dim, factor, partial.acc + r * size.width, size.width, ahead.v,
                   to_fetch);
}

// All heads of a tile in turn, as they lie in memory. q and partial hold the heads' rows one head after the other. `after`
// is the piece that this thread takes next, or null. Each tile's keys and values are fetched during the one before.
template <class S>
void attend_few(const Attention& a, const Piece& piece, const Piece* after, const Sizes& size, const float* q,
                const Partial& partial) {
  const int64_t rows = piece.rows(size.group);
  Places<S> places[2];  // of this tile and head, and of the next
  int now = 0;
  int64_t count = std::min(TILE, piece.end - piece.begin);
  places[0].find(a, piece, piece.begin, count);
  for (int64_t at = piece.begin; at < piece.end; at += TILE) {
    for (int64_t h = 0; h < piece.heads; ++h, now ^= 1) {
      const Piece one = piece.of_head(h, size.group);
      int64_t next = 0;
      if (h + 1 < piece.heads) {
        next = count;
        places[now ^ 1].find(a, piece.of_head(h + 1, size.group), at, next);
      } else if (at + TILE < piece.end) {
        next = std::min(TILE, piece.end - at - TILE);
        places[now ^ 1].find(a, piece, at + TILE, next);
      } else if (after) {
        next = std::min(TILE, after->end - after->begin);
        places[now ^ 1].find(a, *after, after->begin, next);
      }
      const float* queries = q + h * rows * size.width;
      const Partial part{partial.top + h * rows, partial.total + h * rows, partial.acc + h * rows * size.width};
      auto attend = [&](auto width, int64_t r) {
        attend_rows<S, decltype(width)::value>(a, one, size, queries, r, at, count, places[now], places[now ^ 1],
                                               r == 0 ? next : 0, part);
      };
      int64_t r = 0;
      for (; r + 4 <= rows; r += 4) attend(std::integral_constant<int, 4>(), r);
      if (rows - r == 3) attend(std::integral_constant<int, 3>(), r);
      if (rows - r == 2) attend(std::integral_constant<int, 2>(), r);
      if (rows - r == 1) attend(std::integral_constant<int, 1>(), r);
      if (h + 1 == piece.heads) count = next;
    }
  }
}

// ---------------------------------------------------------------- many rows

// out [M][stride] = (accumulate ? out * factor : 0) + x [M] rows (x_stride floats apart) times a panel [steps][kPanel].
template <int M>
void multiply_into(int64_t steps, const float* x, int64_t x_stride, const float* panel, const float* factor, float* out,
                   int64_t stride) {
  vf acc[M][NV];
  clear(acc);
  if (factor) {
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      for (int j = 0; j < NV; ++j) acc[i][j] = load_as<vf>(out + i * stride + j * W) * factor[i];
    }
  }
  const char* w = reinterpret_cast<const char*>(panel);
  const char* nothing = w;
  multiply_tile<StepF32, M>(steps, reinterpret_cast<const char*>(x), x_stride * 4, w, acc, nothing, {0, 0});
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < NV; ++j) store(out + i * stride + j * W, acc[i][j]);
  }
}

using MultiplyInto = void (*)(int64_t, const float*, int64_t, const float*, const float*, float*, int64_t);

template <int... M>
MultiplyInto pick_into(int rows, std::integer_sequence<int, M...>) {
  static constexpr MultiplyInto table[] = {&multiply_into<M + 1>...};
  return table[rows - 1];
}

template <class S>
void attend_many(const Attention& a, const Piece& piece, const Sizes& size, const float* q, const Partial& partial) {
  const int64_t rows = piece.rows(size.group);
  const int64_t value_panels = size.width / kPanel;
  std::unique_ptr<float[]> memory(new float[2 * TILE * size.width + rows * TILE]);
  float* keys = memory.get();                 // [TILE / kPanel][D][kPanel]
  float* values = keys + TILE * size.width;   // [value_panels][TILE][kPanel]
  float* scores = values + TILE * size.width;  // [rows][TILE]
  std::unique_ptr<float[]> line(new float[size.width]());
  std::unique_ptr<float[]> factor(new float[rows]);
  Places<S> places;
  for (int64_t at = piece.begin; at < piece.end; at += TILE) {
    const int64_t count = std::min(TILE, piece.end - at);
    places.find(a, piece, at, count);
    for (int64_t t = 0; t < TILE; ++t) {
      float* column = keys + t / kPanel * size.dim * kPanel + t % kPanel;
      if (t < count) {
        load_floats<S>(line.get(), places.k[t], size.dim);
      } else {
        std::fill(line.get(), line.get() + size.dim, 0.0f);
      }
      for (int64_t d = 0; d < size.dim; ++d) column[d * kPanel] = line[d];
    }
    for (int64_t t = 0; t < count; ++t) {
      load_floats<S>(line.get(), places.v[t], size.dim);
      for (int64_t p = 0; p < value_panels; ++p) {
        std::memcpy(values + (p * TILE + t) * kPanel, line.get() + p * kPanel, kPanel * sizeof(float));
      }
      std::fill(line.get() + size.dim, line.get() + size.width, 0.0f);
    }
    // Rows whose tokens end before this tile, or whose window begins after it, see nothing of it.
    int64_t skip = at > piece.position ? (at - piece.position) * size.group : 0;
    int64_t stop = rows;
    if (a.window) stop = std::min(rows, (at + count - 1 + a.window - piece.position) * size.group);
    const int64_t tiles = (stop - skip + StepF32::MOST - 1) / StepF32::MOST;
    int64_t r = skip;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t m = (stop - r + tiles - t - 1) / (tiles - t);
      const MultiplyInto multiply = pick_into(int(m), std::make_integer_sequence<int, StepF32::MOST>());
      // Keys that none of these rows sees are left out; `update_softmax` gives those of the last panel weight 0.
      const int64_t seen = std::min(count, piece.position + (r + m - 1) / size.group + 1 - at);
      for (int64_t p = 0; p * kPanel < seen; ++p) {
        multiply(size.dim, q + r * size.width, size.width, keys + p * size.dim * kPanel, nullptr,
                 scores + r * TILE + p * kPanel, TILE);
      }
      for (int64_t i = r; i < r + m; ++i) {
        float* row = scores + i * TILE;
        if (a.pages.k_scales) {
          for (int64_t j = 0; j < count; ++j) row[j] *= places.k_scale[j];
        }
        int64_t first, last;
        see(a, piece.position + i / size.group, at, count, &first, &last);
        factor[i] = update_softmax(a, row, first, last, partial.top + i, partial.total + i);
        if (a.pages.v_scales) {
          for (int64_t j = first; j < last; ++j) row[j] *= places.v_scale[j];
        }
      }
      for (int64_t p = 0; p < value_panels; ++p) {
        multiply(seen, scores + r * TILE, TILE, values + p * TILE * kPanel, factor.get() + r,
                 partial.acc + r * size.width + p * kPanel, size.width);
      }
      r += m;
    }
  }
}

// ---------------------------------------------------------------- rows in and out

template <class Q>
void load_queries_of(const Attention& a, const Piece& piece, const Sizes& size, float* q) {
  for (int64_t r = 0; r < piece.rows(size.group); ++r) {
    const int64_t row = piece.row + r / size.group, head = piece.head * size.group + r % size.group;
    const auto* from = static_cast<const typename Q::T*>(a.q) + (row * a.heads + head) * size.dim;
    float* to = q + r * size.width;
    load_floats<Q>(to, from, size.dim);
    for (int64_t d = 0; d < size.dim; ++d) to[d] *= a.scale;
    std::fill(to + size.dim, to + size.width, 0.0f);
  }
}

// The finished rows of a piece: the sink joins the softmax, then values over weights.
template <class Q>
void store_outputs_of(const Attention& a, const Piece& piece, const Sizes& size, const Partial& partial) {
  for (int64_t r = 0; r < piece.rows(size.group); ++r) {
    const int64_t row = piece.row + r / size.group, head = piece.head * size.group + r % size.group;
    float top = partial.top[r], total = partial.total[r], factor = 1.0f;
    if (a.sinks) {
      const float sink = a.sinks[head], most = std::max(top, sink);
      factor = std::exp(top - most);
      total = total * factor + std::exp(sink - most);
      top = most;
    }
    float* acc = partial.acc + r * size.width;
    for (int64_t d = 0; d < size.dim; ++d) acc[d] *= factor / total;
    store_as<Q>(static_cast<typename Q::T*>(a.out) + (row * a.heads + head) * size.dim, acc, size.dim);
    if (a.lse) a.lse[row * a.heads + head] = top + std::log(total);
  }
}

// The type of queries and outputs is looked at once a piece, not compiled into everything above.
void load_queries(const Attention& a, const Piece& piece, const Sizes& size, float* q) {
  switch (a.q_type) {
    case Type::f32: return load_queries_of<F32>(a, piece, size, q);
    case Type::bf16: return load_queries_of<BF16>(a, piece, size, q);
    default: return load_queries_of<F16>(a, piece, size, q);
  }
}

void store_outputs(const Attention& a, const Piece& piece, const Sizes& size, const Partial& partial) {
  switch (a.q_type) {
    case Type::f32: return store_outputs_of<F32>(a, piece, size, partial);
    case Type::bf16: return store_outputs_of<BF16>(a, piece, size, partial);
    default: return store_outputs_of<F16>(a, piece, size, partial);
  }
}

// part's softmax into `into`'s, row by row.
inline void merge(const Partial& into, const Partial& part, int64_t rows, int64_t width) {
  const float low = -std::numeric_limits<float>::infinity();
  for (int64_t r = 0; r < rows; ++r) {
    if (part.top[r] == low) continue;
    const float top = std::max(into.top[r], part.top[r]);
    const float mine = into.top[r] == low ? 0.0f : std::exp(into.top[r] - top), other = std::exp(part.top[r] - top);
    into.total[r] = into.total[r] * mine + part.total[r] * other;
    for (int64_t d = 0; d < width; ++d) {
      into.acc[r * width + d] = into.acc[r * width + d] * mine + part.acc[r * width + d] * other;
    }
    into.top[r] = top;
  }
}

// ---------------------------------------------------------------- the whole batch

// Cuts the batch into pieces; those that share rows follow each other. Returns how many rows of partial results they
// need. Rows of no piece (padding, empty sequences) are marked in `idle`. Few rows take all heads in one piece, unless
// that leaves too few pieces for the threads.
inline int64_t cut(const Attention& a, const Sizes& size, int64_t threads, std::vector<Piece>& pieces,
                   std::vector<bool>& idle) {
  idle.assign(a.rows, true);
  const int64_t most_tokens = std::max<int64_t>(1, MANY_ROWS / size.group);
  int64_t cuts = 0;
  for (int64_t s = 0; s < a.sequences; ++s) cuts += (a.lengths[s] + PART - 1) / PART;
  const int64_t together = cuts >= 4 * threads ? a.pages.heads : 1;
  int64_t partials = 0;
  for (int64_t s = 0; s < a.sequences; ++s) {
    const int64_t begin = a.starts ? a.starts[s] : s, end = a.starts ? a.starts[s + 1] : s + 1;
    const int64_t length = std::min<int64_t>(a.lengths[s], a.columns * a.pages.block_size);
    if (begin < 0 || end > a.rows || end - begin > length || length <= 0) continue;
    for (int64_t row = begin; row < end; ++row) idle[row] = false;
    for (int64_t row = begin; row < end; row += most_tokens) {
      const int64_t tokens = std::min(most_tokens, end - row);
      const int64_t position = length - (end - row), stop = position + tokens;
      const int64_t first = a.window ? std::max<int64_t>(0, position - a.window + 1) : 0;
      const bool whole = first / PART == (stop - 1) / PART;
      const int64_t heads = is_few(tokens, size) ? together : 1;
      for (int64_t h = 0; h < a.pages.heads; h += heads) {
        for (int64_t at = first; at < stop;) {
          const int64_t until = std::min(stop, (at / PART + 1) * PART);
          pieces.push_back({s, h, heads, row, tokens, position, at, until, whole ? -1 : partials});
          if (!whole) partials += heads * tokens * size.group;
          at = until;
        }
      }
    }
  }
  return partials;
}

template <class S>
void attention_of(const Attention& a, const Pool& pool) {
  const int64_t dim = a.pages.head_dim;
  const Sizes size{a.heads / a.pages.heads, dim, (dim + kPanel - 1) / kPanel * kPanel};
  std::vector<Piece> pieces;
  std::vector<bool> idle;
  const int64_t partials = cut(a, size, pool.threads, pieces, idle);
  std::unique_ptr<float[]> shared(new float[partials * (size.width + 2)]);
  auto partial_at = [&](float* memory, int64_t all, int64_t row) {
    return Partial{memory + row, memory + all + row, memory + 2 * all + row * size.width};
  };

  pool.run(int64_t(pieces.size()), [&](int64_t i, int64_t next) {
    const Piece& piece = pieces[i];
    const int64_t each = piece.rows(size.group), rows = each * piece.heads;
    const bool alone = piece.partial < 0;
    Scratch memory(rows * (alone ? 2 * size.width + 2 : size.width));
    float* q = memory.get();
    const Partial partial =
        alone ? partial_at(q + rows * size.width, rows, 0) : partial_at(shared.get(), partials, piece.partial);
    for (int64_t h = 0; h < piece.heads; ++h) {
      load_queries(a, piece.of_head(h, size.group), size, q + h * each * size.width);
    }
    std::fill(partial.top, partial.top + rows, -std::numeric_limits<float>::infinity());
    std::fill(partial.total, partial.total + rows, 0.0f);
    std::fill(partial.acc, partial.acc + rows * size.width, 0.0f);
    if (is_few(piece.tokens, size)) {
      attend_few<S>(a, piece, next < 0 ? nullptr : &pieces[next], size, q, partial);
    } else {
      attend_many<S>(a, piece, size, q, partial);
    }
    if (!alone) return;
    for (int64_t h = 0; h < piece.heads; ++h) {
      const Partial one{partial.top + h * each, partial.total + h * each, partial.acc + h * each * size.width};
      store_outputs(a, piece.of_head(h, size.group), size, one);
    }
  });

  for (size_t i = 0; i < pieces.size();) {
    const Piece& piece = pieces[i++];
    if (piece.partial < 0) continue;
    const int64_t each = piece.rows(size.group);
    for (; i < pieces.size() && pieces[i].row == piece.row && pieces[i].head == piece.head; ++i) {
      merge(partial_at(shared.get(), partials, piece.partial), partial_at(shared.get(), partials, pieces[i].partial),
            each * piece.heads, size.width);
    }
    for (int64_t h = 0; h < piece.heads; ++h) {
      const Piece one = piece.of_head(h, size.group);
      store_outputs(a, one, size, partial_at(shared.get(), partials, one.partial));
    }
  }

  for (int64_t row = 0; row < a.rows; ++row) {
    if (!idle[row]) continue;
    const int64_t bytes = a.heads * dim * (a.q_type == Type::f32 ? 4 : 2);
    std::memset(static_cast<char*>(a.out) + row * bytes, 0, bytes);
    if (a.lse) std::fill_n(a.lse + row * a.heads, a.heads, -std::numeric_limits<float>::infinity());
  }
}

void attention(const Attention& a, const Pool& pool) {
  switch (a.pages.type) {
    case Type::f32: return attention_of<F32>(a, pool);
    case Type::bf16: return attention_of<BF16>(a, pool);
    case Type::f16: return attention_of<F16>(a, pool);
    case Type::i8: return attention_of<I8>(a, pool);
    case Type::fp8: return attention_of<FP8>(a, pool);
  }
}
