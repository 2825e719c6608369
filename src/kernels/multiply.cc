#include "kernels/multiply.h"

#include <libxsmm.h>

#include <algorithm>
#include <array>
#include <memory>

#include "kernels/transpose.h"

namespace lockstep::kernels {
namespace {

// How much of a product one kernel computes: what was fastest on matrices of 64 to 4096 rows. Rows that lie a multiple
// of 4 KiB apart share few cache sets, so that fewer of them may be in use at once.
struct Blocks {
  std::int64_t rows, columns, depth;
};
Blocks blocks_for(std::int64_t stride) {
  return stride % 1024 == 0 ? Blocks{.rows = 64, .columns = 64, .depth = 512}
                            : Blocks{.rows = 512, .columns = 48, .depth = 512};
}

// The kernels of one product. LIBXSMM finds a kernel in some 100 ns, as long as a small one runs, so the last is kept.
class Kernels {
 public:
  Kernels(Matrix a, std::int64_t c_stride) : a_(a), c_stride_(c_stride) {}

  // For a part of m x k times k x n elements; null where there is none.
  libxsmm_smmfunction find(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t b_stride, bool add) {
    const std::array<std::int64_t, 5> shape{m, n, k, b_stride, add ? 1 : 0};
    if (last_ == nullptr || shape != shape_) last_ = dispatch(m, n, k, b_stride, add);
    shape_ = shape;
    return last_;
  }

 private:
  // LIBXSMM is column-major: its a is our b, and the other way round.
  libxsmm_smmfunction dispatch(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t b_stride, bool add) const {
    const auto narrow = [](std::int64_t value) { return static_cast<libxsmm_blasint>(value); };
    const auto lda = narrow(b_stride), ldb = narrow(a_.stride), ldc = narrow(c_stride_);
    const int flags = a_.transposed ? LIBXSMM_GEMM_FLAG_TRANS_B : LIBXSMM_GEMM_FLAG_NONE;
    const float alpha = 1, beta = add ? 1 : 0;
    return libxsmm_smmdispatch(narrow(n), narrow(m), narrow(k), &lda, &ldb, &ldc, &alpha, &beta, &flags, nullptr);
  }

  const Matrix a_;
  const std::int64_t c_stride_;
  std::array<std::int64_t, 5> shape_{};
  libxsmm_smmfunction last_ = nullptr;
};

constexpr std::int64_t kMostPanel = 64 * 512;

// Some columns of b as rows side by side, in `buffer` if they are not: LIBXSMM has no kernel for a transposed b.
Matrix panel_of(Matrix b, std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns,
                float* buffer) {
  if (!b.transposed) return {b.data + row * b.stride + column, b.stride};
  transpose(b.data + column * b.stride + row, b.stride, columns, rows, buffer, columns);
  return {buffer, columns};
}

}  // namespace

// With AVX2, on one core of an AMD EPYC (Zen 3), MKL's products were faster from here on, large ones up to five times.
bool is_fast_product(std::int64_t m, std::int64_t n, std::int64_t k) {
  constexpr std::int64_t kMostMultiplications = 1 << 21;
  static const bool has_avx512 = libxsmm_get_target_archid() >= LIBXSMM_X86_AVX512;
  return has_avx512 || m * n * k <= kMostMultiplications;
}

bool multiply(std::int64_t m, std::int64_t n, std::int64_t k, Matrix a, Matrix b, float* c, std::int64_t c_stride) {
  const auto blocks = blocks_for(b.transposed ? a.stride : b.stride);
  Kernels kernels(a, c_stride);
  thread_local const auto buffer = std::make_unique<float[]>(kMostPanel);
  for (std::int64_t column = 0; column < n; column += blocks.columns) {
    const auto columns = std::min(blocks.columns, n - column);
    for (std::int64_t depth = 0; depth < k; depth += blocks.depth) {
      const auto depths = std::min(blocks.depth, k - depth);
      const auto part = panel_of(b, depth, depths, column, columns, buffer.get());
      for (std::int64_t row = 0; row < m; row += blocks.rows) {
        const auto rows = std::min(blocks.rows, m - row);
        const auto kernel = kernels.find(rows, columns, depths, part.stride, depth > 0);
        if (kernel == nullptr) return false;
        const float* from = a.transposed ? a.data + depth * a.stride + row : a.data + row * a.stride + depth;
        kernel(part.data, from, c + row * c_stride + column);
      }
    }
  }
  return true;
}

}  // namespace lockstep::kernels
