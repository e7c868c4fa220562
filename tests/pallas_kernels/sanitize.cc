// Runs the kernels on several threads, for several callers at once, in a program of its own: built with a sanitizer it
// ends with an error where threads race or memory is misused. Results must be those of one thread, to the last bit.

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "kernels.h"

using namespace jpaged;
namespace jpaged::JPAGED_ISA {
extern const Kernels kernels;
}

namespace {

class Threads {
 public:
  explicit Threads(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Threads() {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      ended_ = true;
    }
    wake_.notify_all();
    for (std::thread& each : threads_) each.join();
  }
  static void schedule(void* context, void (*run)(void*), void* data) {
    auto* self = static_cast<Threads*>(context);
    std::lock_guard<std::mutex> guard(self->mutex_);
    self->queue_.emplace_back([run, data] { run(data); });
    self->wake_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::function<void()> next;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return ended_ || !queue_.empty(); });
        if (queue_.empty()) return;
        next = std::move(queue_.front());
        queue_.pop_front();
      }
      next();
    }
  }
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  bool ended_ = false;
  std::vector<std::thread> threads_;
};

std::vector<float> draw(size_t count, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(rng);
  return values;
}

// One caller's data, and each kernel on it.
struct Caller {
  static constexpr int64_t rows = 37, n = 150, k = 90;
  const int64_t panel = JPAGED_ISA::kernels.panel, panels = (n + panel - 1) / panel;
  static constexpr int64_t blocks = 80, heads = 2, block_size = 16, dim = 32, q_heads = 4;
  std::vector<float> x = draw(rows * k, 1), weight = draw(panels * k * panel, 2), norm = draw(k, 3);
  std::vector<float> keys = draw(blocks * heads * block_size * dim, 4), values = draw(keys.size(), 5);
  std::vector<float> q = draw(rows * q_heads * dim, 6), new_keys = draw(rows * heads * dim, 7);
  std::vector<int8_t> bytes;  // an int8 weight
  std::vector<int32_t> tables, lengths = {700, 3, 130}, starts = {0, 30, 33, 36}, slots;

  Caller() {
    const int64_t steps = (k + 3) / 4, all = steps + (steps + kGroup - 1) / kGroup + 1;
    bytes.assign(panels * all * panel * 4, 1);  // scales and sums are small numbers then
    for (int32_t i = 0; i < 3 * 45; ++i) tables.push_back(1 + i * 7 % (blocks - 1));
    for (int32_t i = 0; i < rows; ++i) slots.push_back((5 + i) * block_size + i % block_size);
  }

  std::vector<float> run(const Kernels& kernels, const Pool& pool) {
    std::vector<float> out(3 * rows * n + 2 * rows * q_heads * dim);
    float* at = out.data();
    for (int i = 0; i < 3; ++i, at += rows * n) {
      Linear a{};
      a.rows = a.live = rows;
      a.n = n;
      a.k = k;
      a.type = a.y_type = Type::f32;
      a.weight_type = i == 2 ? Type::i8 : Type::f32;
      a.x = x.data();
      a.weight = i == 2 ? static_cast<const void*>(bytes.data()) : weight.data();
      a.norm = i ? norm.data() : nullptr;
      a.eps = 1e-5f;
      a.parts = i ? 1 : 3;
      const int64_t widths[] = {i ? n : 64, 20, n - 84};
      float* part = at;
      for (int64_t p = 0; p < a.parts; part += rows * widths[p++]) {
        a.widths[p] = widths[p];
        a.y[p] = part;
      }
      kernels.linear(a, pool);
    }
    Write w{};
    w.pages = {blocks, heads, block_size, dim, Type::f32, keys.data(), values.data(), nullptr, nullptr};
    w.type = Type::f32;
    w.rows = rows;
    w.k = w.v = new_keys.data();
    w.slots = slots.data();
    kernels.write(w, pool);
    for (int i = 0; i < 2; ++i, at += rows * q_heads * dim) {
      Attention a{};
      a.pages = w.pages;
      a.q_type = Type::f32;
      a.rows = i ? 36 : 3;
      a.heads = q_heads;
      a.q = q.data();
      a.sequences = 3;
      a.columns = 45;
      a.tables = tables.data();
      a.lengths = lengths.data();
      a.starts = i ? starts.data() : nullptr;
      a.scale = 0.2f;
      a.out = at;
      kernels.attention(a, pool);
    }
    return out;
  }
};

}  // namespace

int main() {
  const Kernels& kernels = JPAGED_ISA::kernels;
  const std::vector<float> want = Caller().run(kernels, Pool{});
  Lookout lookout;
  Threads threads(3);
  std::vector<std::thread> callers;
  for (int i = 0; i < 2; ++i) {
    callers.emplace_back([&] {
      Caller caller;
      const Pool pool{&Threads::schedule, &threads, 4, &lookout};
      for (int turn = 0; turn < 20; ++turn) {
        const std::vector<float> got = caller.run(kernels, pool);
        if (std::memcmp(got.data(), want.data(), want.size() * sizeof(float)) != 0) {
          std::puts("threads change the result");
          std::abort();
        }
      }
    });
  }
  for (std::thread& each : callers) each.join();
  std::puts("fine");
}
