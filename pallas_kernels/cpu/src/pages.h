// Storing new keys and values in their pages, rotated first where asked.

// n values of S as they are when stored; and back.
inline void load_line(Type type, float* line, const void* from, int64_t at, int64_t n) {
  switch (type) {
    case Type::f32: return load_floats<F32>(line, static_cast<const float*>(from) + at, n);
    case Type::bf16: return load_floats<BF16>(line, static_cast<const uint16_t*>(from) + at, n);
    default: return load_floats<F16>(line, static_cast<const uint16_t*>(from) + at, n);
  }
}

inline void store_line(Type type, void* to, int64_t at, const float* line, int64_t n) {
  switch (type) {
    case Type::f32: return store_as<F32>(static_cast<float*>(to) + at, line, n);
    case Type::bf16: return store_as<BF16>(static_cast<uint16_t*>(to) + at, line, n);
    default: return store_as<F16>(static_cast<uint16_t*>(to) + at, line, n);
  }
}

// Turns a line of D values.
inline void rotate_line(float* line, const float* cos, const float* sin, int64_t dim) {
  const int64_t half = dim / 2;
  int64_t i = 0;
  for (; i + W <= half; i += W) {
    const vf a = load_as<vf>(line + i), b = load_as<vf>(line + i + half);
    const vf c = load_as<vf>(cos + i), s = load_as<vf>(sin + i);
    store(line + i, a * c - b * s);
    store(line + i + half, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = line[i], b = line[i + half];
    line[i] = a * cos[i] - b * sin[i];
    line[i + half] = b * cos[i] + a * sin[i];
  }
}

// One token's values of one head, quantised with a scale of its own where S is an 8-bit type.
template <class S>
inline void store_token(float* line, int64_t dim, typename S::T* to, float* scale) {
  if (scale) {
    constexpr float most = std::is_same_v<S, I8> ? 127.0f : 448.0f;
    float top = 0;
    for (int64_t d = 0; d < dim; ++d) {
      const float size = std::fabs(line[d]);
      top = size > top || size != size ? size : top;
    }
    *scale = top / most;
    if (*scale == 0) {
      std::fill(line, line + dim, 0.0f);
    } else {
      for (int64_t d = 0; d < dim; ++d) line[d] /= *scale;
    }
  }
  store_as<S>(to, line, dim);
}

template <class S>
void write_of(const Write& w, const Pool& pool) {
  using T = typename S::T;
  const Pages& p = w.pages;
  const int64_t chunk = 8, dim = p.head_dim;
  pool.run((w.rows + chunk - 1) / chunk, [&](int64_t i, int64_t) {
    std::unique_ptr<float[]> line(new float[dim]), held(new float[dim]);
    for (int64_t t = i * chunk; t < std::min(w.rows, (i + 1) * chunk); ++t) {
      const int64_t slot = w.slots[t];
      const float* cos = w.cos ? w.cos + t * (dim / 2) : nullptr;
      const float* sin = w.cos ? w.sin + t * (dim / 2) : nullptr;
      // Padding rows are not stored: several threads would meet in block 0, which nothing reads.
      if (slot < p.block_size || slot >= p.blocks * p.block_size) continue;
      for (int64_t h = 0; h < w.q_heads; ++h) {
        const int64_t at = (t * w.q_heads + h) * dim;
        load_line(w.type, line.get(), w.q, at, dim);
        rotate_line(line.get(), cos, sin, dim);
        store_line(w.type, w.q_out, at, line.get(), dim);
      }
      for (int64_t h = 0; h < p.heads; ++h) {
        const int64_t from = (t * p.heads + h) * dim;
        const int64_t token = (slot / p.block_size * p.heads + h) * p.block_size + slot % p.block_size;
        load_line(w.type, line.get(), w.k, from, dim);
        if (cos) {
          rotate_line(line.get(), cos, sin, dim);
          if (w.type != p.type) {  // what is stored is k as the model holds it
            store_line(w.type, held.get(), 0, line.get(), dim);
            load_line(w.type, line.get(), held.get(), 0, dim);
          }
        }
        store_token<S>(line.get(), dim, static_cast<T*>(p.k) + token * dim, p.k_scales ? p.k_scales + token : nullptr);
        load_line(w.type, line.get(), w.v, from, dim);
        store_token<S>(line.get(), dim, static_cast<T*>(p.v) + token * dim, p.v_scales ? p.v_scales + token : nullptr);
      }
    }
  });
}

void write(const Write& w, const Pool& pool) {
  switch (w.pages.type) {
    case Type::f32: return write_of<F32>(w, pool);
    case Type::bf16: return write_of<BF16>(w, pool);
    case Type::f16: return write_of<F16>(w, pool);
    case Type::i8: return write_of<I8>(w, pool);
    case Type::fp8: return write_of<FP8>(w, pool);
  }
}
