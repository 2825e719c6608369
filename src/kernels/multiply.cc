#include "kernels/matrix.h"

#include <hwy/aligned_allocator.h>
#include <libxsmm.h>

#include <algorithm>
#include <array>
#include <new>

namespace lockstep::kernels {
namespace {

// The kernels of one product. LIBXSMM finds a kernel in some 100 ns, as long as a small one runs, so the last is kept.
class Kernels {
 public:
  Kernels(bool a_transposed, std::int64_t c_stride) : a_transposed_(a_transposed), c_stride_(c_stride) {}

  // Returns a kernel for a part of m x k times k x n elements, or null where there is none.
  libxsmm_smmfunction find(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t a_stride, std::int64_t b_stride,
                           bool add) {
    const std::array<std::int64_t, 6> shape{m, n, k, a_stride, b_stride, add ? 1 : 0};
    if (last_ == nullptr || shape != shape_) last_ = dispatch(m, n, k, a_stride, b_stride, add);
    shape_ = shape;
    return last_;
  }

 private:
  // LIBXSMM is column-major: its a is our b, and the other way round.
  libxsmm_smmfunction dispatch(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t a_stride,
                               std::int64_t b_stride, bool add) const {
    const auto narrow = [](std::int64_t value) { return static_cast<libxsmm_blasint>(value); };
    const auto lda = narrow(b_stride), ldb = narrow(a_stride), ldc = narrow(c_stride_);
    const int flags = a_transposed_ ? LIBXSMM_GEMM_FLAG_TRANS_B : LIBXSMM_GEMM_FLAG_NONE;
    const float alpha = 1, beta = add ? 1 : 0;
    return libxsmm_smmdispatch(narrow(n), narrow(m), narrow(k), &lda, &ldb, &ldc, &alpha, &beta, &flags, nullptr);
  }

  const bool a_transposed_;
  const std::int64_t c_stride_;
  std::array<std::int64_t, 6> shape_{};
  libxsmm_smmfunction last_ = nullptr;
};

// The part of a product that one kernel computes.
struct Blocks {
  std::int64_t rows, columns, depth;
};

auto allocate(std::int64_t count) {
  auto memory = hwy::AllocateAligned<float>(static_cast<std::size_t>(count));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// A part of a matrix, from `row` and `column` on, as rows side by side in `to`.
void pack(Matrix from, std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns, float* to) {
  if (from.transposed)
    return transpose(from.data + column * from.stride + row, from.stride, columns, rows, to, columns);
  for (std::int64_t i = 0; i < rows; ++i)
    std::copy_n(from.data + (row + i) * from.stride + column, columns, to + i * columns);
}

// These were fastest on matrices of 64 to 4096 rows. Rows that lie a multiple of 4 KiB apart share few cache sets, so
// that fewer rows may be in use at once.
Blocks blocks_in_place(std::int64_t stride) {
  return stride % 1024 == 0 ? Blocks{.rows = 64, .columns = 64, .depth = 512}
                            : Blocks{.rows = 512, .columns = 48, .depth = 512};
}

// Copies columns of b only where b is transposed, for which LIBXSMM has no kernel.
bool multiply_in_place(std::int64_t m, std::int64_t n, std::int64_t k, Matrix a, Matrix b, float* c,
                       std::int64_t c_stride) {
  const auto blocks = blocks_in_place(b.transposed ? a.stride : b.stride);
  Kernels kernels(a.transposed, c_stride);
  thread_local const auto buffer = allocate(64 * 512);
  for (std::int64_t column = 0; column < n; column += blocks.columns) {
    const auto columns = std::min(blocks.columns, n - column);
    for (std::int64_t depth = 0; depth < k; depth += blocks.depth) {
      const auto depths = std::min(blocks.depth, k - depth);
      if (b.transposed) pack(b, depth, depths, column, columns, buffer.get());
      const auto part =
          b.transposed ? Matrix{buffer.get(), columns} : Matrix{b.data + depth * b.stride + column, b.stride};
      for (std::int64_t row = 0; row < m; row += blocks.rows) {
        const auto rows = std::min(blocks.rows, m - row);
        const auto kernel = kernels.find(rows, columns, depths, a.stride, part.stride, depth > 0);
        if (kernel == nullptr) return false;
        const float* from = a.transposed ? a.data + depth * a.stride + row : a.data + row * a.stride + depth;
        kernel(part.data, from, c + row * c_stride + column);
      }
    }
  }
  return true;
}

// Blocks of both matrices are copied so that their rows lie side by side: Goto and van de Geijn, "Anatomy of
// High-Performance Matrix Multiplication", 2008. kWide columns of b stay in the cache while all of a goes by.
constexpr Blocks kPacked{.rows = 64, .columns = 32, .depth = 512};
constexpr std::int64_t kWide = 512;

bool multiply_packed(std::int64_t m, std::int64_t n, std::int64_t k, Matrix a, Matrix b, float* c,
                     std::int64_t c_stride) {
  Kernels kernels(/*a_transposed=*/false, c_stride);
  thread_local const auto packed_a = allocate(kPacked.rows * kPacked.depth);
  thread_local const auto packed_b = allocate(kWide * kPacked.depth);
  for (std::int64_t wide = 0; wide < n; wide += kWide) {
    const auto end = std::min(wide + kWide, n);
    for (std::int64_t depth = 0; depth < k; depth += kPacked.depth) {
      const auto depths = std::min(kPacked.depth, k - depth);
      const auto panel = [&](std::int64_t column) { return packed_b.get() + (column - wide) * depths; };
      const auto columns_from = [&](std::int64_t column) { return std::min(kPacked.columns, end - column); };
      for (auto column = wide; column < end; column += kPacked.columns)
        pack(b, depth, depths, column, columns_from(column), panel(column));
      for (std::int64_t row = 0; row < m; row += kPacked.rows) {
        const auto rows = std::min(kPacked.rows, m - row);
        pack(a, row, rows, depth, depths, packed_a.get());
        for (auto column = wide; column < end; column += kPacked.columns) {
          const auto columns = columns_from(column);
          const auto kernel = kernels.find(rows, columns, depths, depths, columns, depth > 0);
          if (kernel == nullptr) return false;
          kernel(panel(column), packed_a.get(), c + row * c_stride + column);
        }
      }
    }
  }
  return true;
}

// Copying pays for large products on processors without AVX-512. Their LIBXSMM kernels need several times as long where
// the rows of a large matrix lie far apart (seen on AMD's Zen 3).
bool pays_to_pack(std::int64_t m, std::int64_t n, std::int64_t k) {
  constexpr std::int64_t kLeastMultiplications = 1 << 21;
  static const bool has_avx512 = libxsmm_get_target_archid() >= LIBXSMM_X86_AVX512;
  return !has_avx512 && m * n * k > kLeastMultiplications;
}

}  // namespace

bool multiply(std::int64_t m, std::int64_t n, std::int64_t k, Matrix a, Matrix b, float* c, std::int64_t c_stride) {
  return (pays_to_pack(m, n, k) ? multiply_packed : multiply_in_place)(m, n, k, a, b, c, c_stride);
}

}  // namespace lockstep::kernels
