#include "kernels/multiply.h"

#include <libxsmm.h>

#include <algorithm>
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

// LIBXSMM is column-major: its a is our b, and the other way round.
libxsmm_smmfunction kernel_for(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t a_stride, bool a_transposed,
                               std::int64_t b_stride, std::int64_t c_stride, bool add) {
  const auto narrow = [](std::int64_t value) { return static_cast<libxsmm_blasint>(value); };
  const auto lda = narrow(b_stride), ldb = narrow(a_stride), ldc = narrow(c_stride);
  const int flags = a_transposed ? LIBXSMM_GEMM_FLAG_TRANS_B : LIBXSMM_GEMM_FLAG_NONE;
  const float alpha = 1, beta = add ? 1 : 0;
  return libxsmm_smmdispatch(narrow(n), narrow(m), narrow(k), &lda, &ldb, &ldc, &alpha, &beta, &flags, nullptr);
}

constexpr std::int64_t kMostPanel = 64 * 512;

// Some columns of b as rows side by side, in `buffer` if they are not: LIBXSMM has no kernel for a transposed b.
Matrix panel_of(Matrix b, std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns,
                float* buffer) {
  if (!b.transposed) return {b.data + row * b.stride + column, b.stride};
  transpose(b.data + column * b.stride + row, b.stride, columns, rows, buffer, columns);
  return {buffer, columns};
}

}  // namespace

bool multiply(std::int64_t m, std::int64_t n, std::int64_t k, Matrix a, Matrix b, float* c, std::int64_t c_stride) {
  const auto blocks = blocks_for(b.transposed ? a.stride : b.stride);
  thread_local const auto buffer = std::make_unique<float[]>(kMostPanel);
  for (std::int64_t column = 0; column < n; column += blocks.columns) {
    const auto columns = std::min(blocks.columns, n - column);
    for (std::int64_t depth = 0; depth < k; depth += blocks.depth) {
      const auto depths = std::min(blocks.depth, k - depth);
      const auto part = panel_of(b, depth, depths, column, columns, buffer.get());
      for (std::int64_t row = 0; row < m; row += blocks.rows) {
        const auto rows = std::min(blocks.rows, m - row);
        const auto kernel = kernel_for(rows, columns, depths, a.stride, a.transposed, part.stride, c_stride, depth > 0);
        if (kernel == nullptr) return false;
        const float* from = a.transposed ? a.data + depth * a.stride + row : a.data + row * a.stride + depth;
        kernel(part.data, from, c + row * c_stride + column);
      }
    }
  }
  return true;
}

}  // namespace lockstep::kernels
