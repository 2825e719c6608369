// The input pipeline alone: Fashion-MNIST through map, cache, shuffle and batch, whole epochs after the one that fills
// the cache.
#include <ATen/ATen.h>
#include <lockstep/lockstep.h>

#include <chrono>
#include <cstdio>

using namespace lockstep;

int main() {
  const auto scaled = [](Example e) {
    e.x = e.x.to(at::kFloat).div(255);
    return e;
  };
  const auto data = datasets::fashion_mnist().train.map(scaled).cache().shuffle(10'000).batch(64);
  double best = 1e9;
  std::int64_t examples = 0;
  for (int epoch = 0; epoch < 5; ++epoch) {
    const auto start = std::chrono::steady_clock::now();
    auto iterator = data.iterate({epoch, 0});
    examples = 0;
    while (const auto batch = iterator.next()) examples += batch->size();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (epoch > 0) best = std::min(best, seconds);
  }
  std::printf("{\"samples_per_s\": %.0f}\n", static_cast<double>(examples) / best);
}
