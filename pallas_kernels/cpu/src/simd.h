// Vectors of floats of the width this file is compiled for, on compiler vector extensions: the same source becomes
// AVX-512, AVX2, SSE or NEON code. Included inside the namespace of one instruction set (see isa.cc).

#if defined(JPAGED_LANES)  // by tests: the geometry of a set that this processor may lack
constexpr int W = JPAGED_LANES;
#elif defined(__AVX512F__)
constexpr int W = 16;  // lanes of a vector
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef int8_t vb __attribute__((vector_size(W)));

inline vf splat(float x) { return x - vf{}; }
inline vf max(vf a, vf b) { return b > a ? b : a; }  // a NaN in b is ignored

template <class V>
inline V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof(v)); }

// ---------------------------------------------------------------- stored types

// Each says how W stored values become floats and how one float is stored.

struct F32 {
  using T = float;
  static vf load(const T* p) { return load_as<vf>(p); }
  static float get(T x) { return x; }
  static T put(float x) { return x; }
};

struct BF16 {
  using T = uint16_t;  // the upper half of a float's bits
  static vf load(const T* p) { return (vf)(__builtin_convertvector(load_as<vh>(p), vi) << 16); }
  static float get(T x) {
    uint32_t bits = uint32_t(x) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  static T put(float x) {  // round to nearest even; a NaN stays one
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

struct F16 {
  using T = uint16_t;
  static float get(T x) {
    // Exponent and fraction moved into place and rebiased by a product; infinities and NaNs have the top exponent.
    uint32_t sign = uint32_t(x & 0x8000) << 16, rest = x & 0x7fff, bits;
    if (rest >= 0x7c00) {
      bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    } else if (rest >= 0x400) {
      bits = sign | ((rest << 13) + (112u << 23));
    } else {
      float f = float(rest) * 0x1p-24f;
      std::memcpy(&bits, &f, 4);
      bits |= sign;
    }
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  static vf load(const T* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(load_as<__m256i>(p));
#elif defined(__F16C__) && defined(__AVX2__)
    return (vf)_mm256_cvtph_ps(load_as<__m128i>(p));
#else
    vf v;
    for (int i = 0; i < W; ++i) v[i] = get(p[i]);
    return v;
#endif
  }
  static T put(float x) {  // round to nearest even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    uint32_t rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return sign | 0x7e00;
    if (rest >= 0x477ff000) return sign | 0x7c00;  // 65,520 and above
    if (rest < 0x38800000) {                       // below 2^-14: multiples of 2^-24
      float magnitude;
      std::memcpy(&magnitude, &rest, 4);
      return sign | uint16_t(std::nearbyint(magnitude * 0x1p24f));
    }
    rest -= 112u << 23;
    return sign | uint16_t((rest + 0xfff + (rest >> 13 & 1)) >> 13);
  }
};

struct I8 {
  using T = int8_t;
  static vf load(const T* p) { return __builtin_convertvector(__builtin_convertvector(load_as<vb>(p), vi), vf); }
  static float get(T x) { return x; }
  static T put(float x) { return T(std::nearbyint(std::min(127.0f, std::max(-127.0f, x)))); }
};

struct FP8 {  // float8_e4m3fn: 4 bits of exponent with bias 7, no infinities, 0x7f is NaN
  using T = uint8_t;
  static float get(T x) {
    if ((x & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
    // The bits are those of a half whose exponent is biased by 15 - 7 = 8 more.
    return F16::get(uint16_t((x & 0x80) << 8 | (x & 0x7f) << 7)) * 256.0f;
  }
  static vf load(const T* p) {
#if defined(__AVX512F__)
    __m256i x = _mm256_cvtepu8_epi16(load_as<__m128i>(p));
    __m256i low = _mm256_and_si256(x, _mm256_set1_epi16(0x7f));
    __m256i half = _mm256_or_si256(_mm256_slli_epi16(_mm256_xor_si256(x, low), 8), _mm256_slli_epi16(low, 7));
    // NaN: the top exponent of a half.
    __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(low, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7e00));
    return (vf)_mm512_cvtph_ps(_mm256_or_si256(half, nan)) * 256.0f;
#else
    vf v;
    for (int i = 0; i < W; ++i) v[i] = get(p[i]);
    return v;
#endif
  }
  static T put(float x) {  // round to nearest even; beyond 448: the largest value
    if (x != x) return 0x7f;
    uint8_t sign = std::signbit(x) ? 0x80 : 0;
    float magnitude = std::min(std::fabs(x), 448.0f);
    if (magnitude < 0x1p-6f) return sign | uint8_t(std::nearbyint(magnitude * 0x1p9f));
    uint32_t bits;
    std::memcpy(&bits, &magnitude, 4);
    bits -= 120u << 23;
    return sign | uint8_t((bits + 0x7ffff + (bits >> 20 & 1)) >> 20);
  }
};

// The first n < W values of p, zeros after them.
template <class S>
inline vf load_part(const typename S::T* p, int64_t n) {
  typename S::T full[W] = {};
  std::memcpy(full, p, n * sizeof(typename S::T));
  return S::load(full);
}

// n floats as S stores them.
template <class S>
inline void store_as(typename S::T* out, const float* in, int64_t n) {
  int64_t i = 0;
  if constexpr (std::is_same_v<S, F32>) {
    for (; i + W <= n; i += W) store(out + i, load_as<vf>(in + i));
  } else if constexpr (std::is_same_v<S, BF16>) {
    for (; i + W <= n; i += W) {
#if defined(__AVX512BF16__)
      const __m256bh half = _mm512_cvtneps_pbh(load_as<__m512>(in + i));
#else
      const vf x = load_as<vf>(in + i);
      const vu bits = (vu)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
      const vh half = __builtin_convertvector(x == x ? rounded : bits >> 16 | 0x40, vh);  // as `BF16::put` does
#endif
      std::memcpy(out + i, &half, sizeof(half));
    }
  }
  for (; i < n; ++i) out[i] = S::put(in[i]);
}

// n stored values as floats.
template <class S>
inline void load_floats(float* out, const typename S::T* in, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, S::load(in + i));
  for (; i < n; ++i) out[i] = S::get(in[i]);
}

// ---------------------------------------------------------------- sums and functions

inline float sum(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float total = 0;
  for (int i = 0; i < W; ++i) total += v[i];
  return total;
#endif
}

inline float largest(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float top = v[0];
  for (int i = 1; i < W; ++i) top = v[i] > top ? v[i] : top;
  return top;
#endif
}

// out[i] = the sum of v[i]'s lanes.
inline void sum_four(float* out, const vf v[4]) {
#if defined(__AVX512F__)
  __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd),
                              _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(abcd), 1)));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(__AVX2__)
  __m256 ab = _mm256_hadd_ps((__m256)v[0], (__m256)v[1]), cd = _mm256_hadd_ps((__m256)v[2], (__m256)v[3]);
  __m256 abcd = _mm256_hadd_ps(ab, cd);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
#else
  for (int i = 0; i < 4; ++i) out[i] = sum(v[i]);
#endif
}

// e^x to about one unit in the last place; 0 < e^x < inf is kept by clamping x. A NaN stays one.
// Cephes' expf (S. Moshier): range reduction by ln 2 in two parts, then a polynomial of degree 6.
inline vf exp(vf x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  x = x > 88.0f ? splat(88.0f) : x;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  vf shifted = x * 1.44269504088896341f + magic;
  vf n = shifted - magic;
  vf r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  vi power = ((vi)shifted - 0x4b400000 + 127) << 23;
  return p * (vf)power;
}

// tanh x: near 0 Cephes' polynomial, elsewhere by exp.
inline vf tanh(vf x) {
  vf square = x * x;
  vf p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  vf near = p * square * x + x;
  vf far = 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
  return (square < 0.390625f) ? near : far;
}

inline vf silu(vf x) { return x / (1.0f + exp(-x)); }
