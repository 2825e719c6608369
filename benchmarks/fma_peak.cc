// Measures the floating-point operations a second of one core, which bound every training step.
#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace {

// Twelve sums side by side hide the latency of an addition. `T` and its functions are of one vector size.
#define MEASURE(T, zero, set, fma, lanes)                        \
  T sums[12];                                                    \
  for (auto& sum : sums) sum = zero();                           \
  const T a = set(factor), b = set(factor * 0.5F);               \
  for (int round = 0; round < rounds; ++round) {                 \
    for (auto& sum : sums) sum = fma(a, b, sum);                 \
  }                                                              \
  T total = zero();                                              \
  for (const auto& sum : sums) total = fma(a, sum, total);       \
  volatile float kept = *reinterpret_cast<const float*>(&total); \
  (void)kept;                                                    \
  return 2.0 * lanes * 12 * rounds;

[[gnu::target("avx512f")]] double run_512(int rounds, float factor) {
  MEASURE(__m512, _mm512_setzero_ps, _mm512_set1_ps, _mm512_fmadd_ps, 16)
}
[[gnu::target("avx2,fma")]] double run_256(int rounds, float factor) {
  MEASURE(__m256, _mm256_setzero_ps, _mm256_set1_ps, _mm256_fmadd_ps, 8)
}
#undef MEASURE

}  // namespace

int main() {
  const auto run = __builtin_cpu_supports("avx512f") ? &run_512 : &run_256;
  double best = 0;
  for (int i = 0; i < 20; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const double operations = run(5'000'000, 1e-3F);
    best = std::max(best, operations / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::printf("{\"gflops\": %.1f}\n", best * 1e-9);
}
