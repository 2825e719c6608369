// Products of matrices of float, by LIBXSMM: it compiles a kernel for each shape at run time.
#pragma once

#include <cstdint>

namespace lockstep::kernels {

// Rows of `data` lie `stride` elements apart; `transposed`: they are the matrix's columns.
struct Matrix {
  const float* data;
  std::int64_t stride;
  bool transposed = false;
};

// c[m][n] = a[m][k] b[k][n], where one of a and b may be transposed. Each element of c is one sum in the order of k,
// whatever m and n are. Nothing overlaps; no alignment is asked. Returns false, with c in any state, where LIBXSMM has
// no kernel for the shape or the processor. Any thread may call.
[[nodiscard]] bool multiply(std::int64_t m, std::int64_t n, std::int64_t k, Matrix a, Matrix b, float* c,
                            std::int64_t c_stride);

}  // namespace lockstep::kernels
