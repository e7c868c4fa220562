// The custom calls that XLA sees: shapes and types are checked here once more, then the kernels of the best instruction
// set of this processor run on XLA's own threads.

#include <algorithm>
#include <cstring>
#include <string_view>

#if defined(__linux__)
#include <malloc.h>
#include <sys/mman.h>
#endif

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jpaged {

#define JPAGED_SETS(X) X(plain) X(avx2) X(avx512) X(avx512bf16)
#define JPAGED_DECLARE(set) \
  namespace set {           \
  extern const Kernels kernels; \
  }
JPAGED_SETS(JPAGED_DECLARE)

namespace {

// An instruction set that was compiled for, and whether this processor has it.
struct Set {
  const Kernels& kernels;
  bool (*runs_here)();
};

#if defined(JPAGED_HAVE_X86_SETS)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512bf16() {  // every processor that has it has VNNI
  return has_avx512() && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}
#endif

// The best first.
const Set kSets[] = {
#if defined(JPAGED_HAVE_X86_SETS)
    {avx512bf16::kernels, has_avx512bf16},
    {avx512::kernels, has_avx512},
    {avx2::kernels, has_avx2},
#endif
    {plain::kernels, [] { return true; }},
};

// The kernels named, or nullptr if they are unknown or this processor cannot run them. "": the best there are.
const Kernels* find_kernels(std::string_view name) {
  for (const Set& set : kSets) {
    if ((name.empty() || name == set.kernels.name) && set.runs_here()) return &set.kernels;
  }
  return nullptr;
}

// The set a call asks for: "" in service, a name in tests.
ffi::ErrorOr<const Kernels*> kernels_for(std::string_view name) {
  static const Kernels* const best = find_kernels("");
  const Kernels* found = name.empty() ? best : find_kernels(name);
  if (!found) return ffi::Unexpected(ffi::Error::InvalidArgument("no such instruction set on this processor"));
  return found;
}

Pool borrow(ffi::ThreadPool& threads) {
  static Lookout* const lookout = new Lookout;  // never destroyed: a helper may outlive main
  Pool pool;
  pool.lookout = lookout;
  pool.schedule = [](void* context, void (*run)(void*), void* data) {
    static_cast<ffi::ThreadPool*>(context)->Schedule([run, data] { run(data); });
  };
  pool.context = &threads;
  pool.threads = threads.num_threads();
  return pool;
}

ffi::Error wrong(const char* what) { return ffi::Error::InvalidArgument(what); }

#define JPAGED_CHECK(condition) \
  if (!(condition)) return wrong("jpaged: not so: " #condition)

bool read_type(ffi::DataType from, Type* to) {
  switch (from) {
    case ffi::DataType::F32: *to = Type::f32; return true;
    case ffi::DataType::U16:  // bfloat16 bits
    case ffi::DataType::BF16: *to = Type::bf16; return true;
    case ffi::DataType::F16: *to = Type::f16; return true;
    case ffi::DataType::S8: *to = Type::i8; return true;
    case ffi::DataType::U8:  // float8_e4m3fn bits
    case ffi::DataType::F8E4M3FN: *to = Type::fp8; return true;
    default: return false;
  }
}

bool is_float(Type type) { return type == Type::f32 || type == Type::bf16 || type == Type::f16; }

// An operand that may be left out is passed as an array without elements.
template <class T = void>
T* optional_data(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() ? static_cast<T*>(buffer.untyped_data()) : nullptr;
}

ffi::Error read_pages(const ffi::AnyBuffer& k, const ffi::AnyBuffer& v, const ffi::AnyBuffer& k_scales,
                      const ffi::AnyBuffer& v_scales, Pages* pages) {
  auto shape = k.dimensions();
  JPAGED_CHECK(shape.size() == 4 && k.element_type() == v.element_type());
  JPAGED_CHECK(k.element_count() == v.element_count());
  pages->blocks = shape[0];
  pages->heads = shape[1];
  pages->block_size = shape[2];
  pages->head_dim = shape[3];
  JPAGED_CHECK(read_type(k.element_type(), &pages->type));
  pages->k = k.untyped_data();
  pages->v = v.untyped_data();
  const bool scaled = pages->type == Type::i8 || pages->type == Type::fp8;
  const size_t scales = scaled ? size_t(shape[0] * shape[1] * shape[2]) : 0;
  JPAGED_CHECK(k_scales.element_count() == scales && v_scales.element_count() == scales);
  JPAGED_CHECK(k_scales.element_type() == ffi::DataType::F32 && v_scales.element_type() == ffi::DataType::F32);
  pages->k_scales = optional_data<float>(k_scales);
  pages->v_scales = optional_data<float>(v_scales);
  return ffi::Error::Success();
}

// ---------------------------------------------------------------- attention

ffi::Error attend(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer k_scales,
                  ffi::AnyBuffer v_scales, ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> lengths,
                  ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::F32> sinks, ffi::Result<ffi::AnyBuffer> out,
                  ffi::Result<ffi::Buffer<ffi::F32>> lse, float scale, int64_t window, float soft_cap,
                  std::string_view set) {
  auto kernels = kernels_for(set);
  if (!kernels) return kernels.error();
  Attention a{};
  if (auto error = read_pages(k, v, k_scales, v_scales, &a.pages); error.failure()) return error;
  auto shape = q.dimensions();
  JPAGED_CHECK(shape.size() == 3 && shape[2] == a.pages.head_dim && shape[1] % a.pages.heads == 0);
  JPAGED_CHECK(read_type(q.element_type(), &a.q_type) && is_float(a.q_type));
  JPAGED_CHECK(out->element_type() == q.element_type() && out->element_count() == q.element_count());
  a.rows = shape[0];
  a.heads = shape[1];
  a.q = q.untyped_data();
  JPAGED_CHECK(tables.dimensions().size() == 2);
  a.sequences = tables.dimensions()[0];
  a.columns = tables.dimensions()[1];
  JPAGED_CHECK(int64_t(lengths.element_count()) == a.sequences);
  const int64_t count = starts.element_count();
  JPAGED_CHECK(count == a.sequences + 1 || (count == 0 && a.rows == a.sequences));
  JPAGED_CHECK(sinks.element_count() == 0 || int64_t(sinks.element_count()) == a.heads);
  JPAGED_CHECK(lse->element_count() == 0 || int64_t(lse->element_count()) == a.rows * a.heads);
  a.tables = tables.typed_data();
  a.lengths = lengths.typed_data();
  a.starts = count ? starts.typed_data() : nullptr;
  a.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  a.scale = scale;
  a.window = window;
  a.soft_cap = soft_cap;
  a.out = out->untyped_data();
  a.lse = lse->element_count() ? lse->typed_data() : nullptr;
  (*kernels)->attention(a, borrow(threads));
  return ffi::Error::Success();
}

// ---------------------------------------------------------------- pages

// With q: rotates q and k by cos and sin on the way. Without (no elements): stores k as it is.
ffi::Error write_kv(ffi::ThreadPool threads, ffi::AnyBuffer k_pages, ffi::AnyBuffer v_pages, ffi::AnyBuffer k_scales,
                    ffi::AnyBuffer v_scales, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                    ffi::Buffer<ffi::S32> slots, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                    ffi::Result<ffi::AnyBuffer> k_out, ffi::Result<ffi::AnyBuffer> v_out,
                    ffi::Result<ffi::AnyBuffer> k_scales_out, ffi::Result<ffi::AnyBuffer> v_scales_out,
                    ffi::Result<ffi::AnyBuffer> q_out, std::string_view set) {
  auto kernels = kernels_for(set);
  if (!kernels) return kernels.error();
  Write w{};
  if (auto error = read_pages(*k_out, *v_out, *k_scales_out, *v_scales_out, &w.pages); error.failure()) return error;
  JPAGED_CHECK(k_pages.untyped_data() == w.pages.k && v_pages.untyped_data() == w.pages.v);
  JPAGED_CHECK(optional_data<float>(k_scales) == w.pages.k_scales && optional_data<float>(v_scales) == w.pages.v_scales);
  auto shape = k.dimensions();
  JPAGED_CHECK(shape.size() == 3 && shape[1] == w.pages.heads && shape[2] == w.pages.head_dim);
  JPAGED_CHECK(k.element_type() == v.element_type() && k.element_count() == v.element_count());
  JPAGED_CHECK(read_type(k.element_type(), &w.type) && is_float(w.type));
  w.rows = shape[0];
  JPAGED_CHECK(int64_t(slots.element_count()) == w.rows);
  w.k = k.untyped_data();
  w.v = v.untyped_data();
  w.slots = slots.typed_data();
  JPAGED_CHECK(q.element_type() == k.element_type() && q_out->element_type() == k.element_type());
  JPAGED_CHECK(q.element_count() == q_out->element_count());
  if (q.element_count()) {
    auto queries = q.dimensions();
    JPAGED_CHECK(queries.size() == 3 && queries[0] == w.rows && queries[2] == shape[2] && shape[2] % 2 == 0);
    JPAGED_CHECK(int64_t(cos.element_count()) == w.rows * (shape[2] / 2) && cos.element_count() == sin.element_count());
    w.q_heads = queries[1];
    w.q = q.untyped_data();
    w.cos = cos.typed_data();
    w.sin = sin.typed_data();
    w.q_out = q_out->untyped_data();
  }
  (*kernels)->write(w, borrow(threads));
  return ffi::Error::Success();
}

// ---------------------------------------------------------------- products

// Whether a weight ends in the shape of `parts` packed ones of [n, k] (see kernels.h), after `leading` axes.
bool is_packed(const ffi::AnyBuffer& weight, Type type, int64_t n, int64_t k, int64_t panel, int64_t parts,
               size_t leading) {
  const int64_t per_step = type == Type::f32 ? 1 : type == Type::bf16 ? 2 : 4;
  int64_t steps = (k + per_step - 1) / per_step;
  if (type == Type::i8) steps += (steps + kGroup - 1) / kGroup + 1;
  const int64_t wanted[] = {(n + panel - 1) / panel * parts, steps, panel, per_step};
  auto shape = weight.dimensions();
  if (shape.size() != leading + 4) return false;
  return std::equal(shape.begin() + leading, shape.end(), std::begin(wanted), std::end(wanted));
}

// Where one of `layers` equal parts of an operand begins; nullptr if the operand is left out.
const void* part_of(const ffi::AnyBuffer& operand, int64_t layers, int64_t layer) {
  if (!operand.element_count()) return nullptr;
  return static_cast<const char*>(operand.untyped_data()) + operand.size_bytes() / layers * layer;
}

ffi::Error multiply(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer norm,
                    ffi::AnyBuffer bias, ffi::AnyBuffer residual, ffi::Buffer<ffi::S32> live, ffi::Buffer<ffi::S32> layer,
                    ffi::RemainingRets outputs, float eps, bool gated, std::string_view set) {
  auto kernels = kernels_for(set);
  if (!kernels) return kernels.error();
  Linear a{};
  JPAGED_CHECK(x.dimensions().size() == 2);
  a.rows = x.dimensions()[0];
  a.k = x.dimensions()[1];
  JPAGED_CHECK(read_type(x.element_type(), &a.type) && (a.type == Type::f32 || a.type == Type::bf16));
  a.parts = outputs.size();
  JPAGED_CHECK(a.parts >= 1 && a.parts <= kMostParts);
  for (int64_t p = 0; p < a.parts; ++p) {
    auto part = outputs.get<ffi::AnyBuffer>(p);
    if (!part) return part.error();
    ffi::AnyBuffer& y = **part;
    JPAGED_CHECK(y.dimensions().size() == 2 && y.dimensions()[0] == a.rows);
    JPAGED_CHECK(read_type(y.element_type(), &a.y_type) && (a.y_type == a.type || a.y_type == Type::f32));
    JPAGED_CHECK(p == 0 || y.element_type() == (*outputs.get<ffi::AnyBuffer>(0))->element_type());
    a.widths[p] = y.dimensions()[1];
    a.y[p] = y.untyped_data();
    a.n += a.widths[p];
  }
  JPAGED_CHECK(read_type(weight.element_type(), &a.weight_type));
  JPAGED_CHECK(a.weight_type == a.type || a.weight_type == Type::i8);
  const size_t stacked = layer.element_count();  // 1: weight, norm and bias are those of many layers
  JPAGED_CHECK(stacked <= 1 && is_packed(weight, a.weight_type, a.n, a.k, (*kernels)->panel, gated ? 2 : 1, stacked));
  const int64_t layers = stacked ? weight.dimensions()[0] : 1;
  const int64_t at = stacked ? *layer.typed_data() : 0;
  JPAGED_CHECK(at >= 0 && at < layers);
  for (const ffi::AnyBuffer* each : {&norm, &bias}) JPAGED_CHECK(each->element_type() == x.element_type());
  JPAGED_CHECK(norm.element_count() == 0 || int64_t(norm.element_count()) == layers * a.k);
  JPAGED_CHECK(bias.element_count() == 0 || int64_t(bias.element_count()) == layers * a.n * (gated ? 2 : 1));
  Type residual_type;
  JPAGED_CHECK(read_type(residual.element_type(), &residual_type) && residual_type == a.y_type);
  JPAGED_CHECK(residual.element_count() == 0 || (a.parts == 1 && int64_t(residual.element_count()) == a.rows * a.n));
  a.x = x.untyped_data();
  a.weight = part_of(weight, layers, at);
  a.norm = part_of(norm, layers, at);
  a.eps = eps;
  a.bias = part_of(bias, layers, at);
  a.residual = optional_data(residual);
  a.gated = gated;
  JPAGED_CHECK(live.element_count() <= 1);
  a.live = a.rows;
  if (live.element_count()) a.live = std::min<int64_t>(a.rows, std::max<int64_t>(0, *live.typed_data()));
  (*kernels)->linear(a, borrow(threads));
  return ffi::Error::Success();
}

ffi::Error take(ffi::ThreadPool threads, ffi::AnyBuffer weight, ffi::Buffer<ffi::S32> ids,
                ffi::Result<ffi::AnyBuffer> out, int64_t rows, std::string_view set) {
  auto kernels = kernels_for(set);
  if (!kernels) return kernels.error();
  TakeRows a{};
  JPAGED_CHECK(out->dimensions().size() == 2);
  JPAGED_CHECK(read_type(out->element_type(), &a.type) && (a.type == Type::f32 || a.type == Type::bf16));
  JPAGED_CHECK(read_type(weight.element_type(), &a.weight_type));
  JPAGED_CHECK(a.weight_type == a.type || a.weight_type == Type::i8);
  a.rows = out->dimensions()[0];
  a.k = out->dimensions()[1];
  a.n = rows;
  JPAGED_CHECK(a.n > 0 && is_packed(weight, a.weight_type, a.n, a.k, (*kernels)->panel, 1, 0));
  JPAGED_CHECK(int64_t(ids.element_count()) == a.rows);
  a.weight = weight.untyped_data();
  a.ids = ids.typed_data();
  a.out = out->untyped_data();
  (*kernels)->take_rows(a, borrow(threads));
  return ffi::Error::Success();
}

// ---------------------------------------------------------------- memory

// Zeros that take memory only as they are written to, in huge pages where the system has them: the pages of a KV pool are
// read in random order, and each of the small ones costs a search of the page tables.
ffi::Error zero(ffi::Result<ffi::AnyBuffer> out) {
  char* begin = static_cast<char*>(out->untyped_data());
  char* end = begin + out->size_bytes();
#if defined(__linux__)
  constexpr uintptr_t huge = uintptr_t(2) << 20;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + huge - 1) / huge * huge;
  const uintptr_t last = reinterpret_cast<uintptr_t>(end) / huge * huge;
  if (first < last) {
    void* pages = reinterpret_cast<void*>(first);
    madvise(pages, last - first, MADV_HUGEPAGE);  // only advice
    if (madvise(pages, last - first, MADV_DONTNEED) == 0) {  // private memory without a file is zeros after that
      std::memset(begin, 0, first - reinterpret_cast<uintptr_t>(begin));
      begin = reinterpret_cast<char*>(last);
    }
  }
#endif
  std::memset(begin, 0, end - begin);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jpaged

#pragma GCC visibility push(default)  // what follows is all that the library shows

using jpaged::attend;
using jpaged::multiply;
using jpaged::take;
using jpaged::write_kv;
using jpaged::zero;

using Any = ffi::AnyBuffer;
using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_cpu_attention, attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()     // q
                                  .Arg<Any>()     // k_pages
                                  .Arg<Any>()     // v_pages
                                  .Arg<Any>()     // k_scales
                                  .Arg<Any>()     // v_scales
                                  .Arg<Ints>()    // tables
                                  .Arg<Ints>()    // lengths
                                  .Arg<Ints>()    // starts
                                  .Arg<Floats>()  // sinks
                                  .Ret<Any>()     // out
                                  .Ret<Floats>()  // lse
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap")
                                  .Attr<std::string_view>("set"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_cpu_write_kv, write_kv,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()     // k_pages
                                  .Arg<Any>()     // v_pages
                                  .Arg<Any>()     // k_scales
                                  .Arg<Any>()     // v_scales
                                  .Arg<Any>()     // q
                                  .Arg<Any>()     // k
                                  .Arg<Any>()     // v
                                  .Arg<Ints>()    // slots
                                  .Arg<Floats>()  // cos
                                  .Arg<Floats>()  // sin
                                  .Ret<Any>()     // the pages, in place
                                  .Ret<Any>()
                                  .Ret<Any>()
                                  .Ret<Any>()
                                  .Ret<Any>()  // q, rotated
                                  .Attr<std::string_view>("set"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_cpu_linear, multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()   // x
                                  .Arg<Any>()   // weight
                                  .Arg<Any>()   // norm
                                  .Arg<Any>()   // bias
                                  .Arg<Any>()   // residual
                                  .Arg<Ints>()  // live
                                  .Arg<Ints>()  // layer
                                  .RemainingRets()  // y, in one part or several
                                  .Attr<float>("eps")
                                  .Attr<bool>("gated")
                                  .Attr<std::string_view>("set"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_cpu_take_rows, take,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()   // weight
                                  .Arg<Ints>()  // ids
                                  .Ret<Any>()   // out
                                  .Attr<int64_t>("rows")
                                  .Attr<std::string_view>("set"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_cpu_zeros, zero, ffi::Ffi::Bind().Ret<Any>());

// How the C library keeps memory while a model is loaded and its programs are compiled: one arena for all threads, for
// with one each, what the threads that load programs leave behind is never used again; large pieces from the system; and
// of what is free at the end of the arena so much stays that not every array in turn is mapped and zeroed anew.
extern "C" void jpaged_cpu_keep_memory_for_loading() {
#if defined(__GLIBC__)
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
  mallopt(M_TRIM_THRESHOLD, 32 << 20);
#endif
}

// Gives the system what free memory the C library keeps, and has it keep what steps free from now on: the next step asks
// for the same, and mapping memory costs a step more than a twentieth of its time.
extern "C" void jpaged_cpu_keep_memory_for_steps() {
#if defined(__GLIBC__)
  malloc_trim(0);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 64 << 20);
#endif
}

// The name of an instruction set: the i-th that this processor has, best first; nullptr past the last.
extern "C" const char* jpaged_cpu_set(int i) {
  for (const jpaged::Set& set : jpaged::kSets) {
    if (set.runs_here() && i-- == 0) return set.kernels.name;
  }
  return nullptr;
}

// Columns of a packed weight's panel, for an instruction set that this processor has, or the best (""); else 0.
extern "C" int jpaged_cpu_panel(const char* set) {
  const jpaged::Kernels* kernels = jpaged::find_kernels(set);
  return kernels ? int(kernels->panel) : 0;
}

#pragma GCC visibility pop
