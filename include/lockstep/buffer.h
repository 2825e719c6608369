// What a Group moves: memory that the caller owns, with an element type. Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lockstep {

// boolean: a byte that is 0 or 1, which is reduced by min (and) and max (or) alone.
enum class DType : std::uint8_t { float32, float64, float16, bfloat16, int32, int64, uint8, int8, int16, boolean };
inline constexpr int kDTypes = static_cast<int>(DType::boolean) + 1;
enum class ReduceOp : std::uint8_t { sum, mean, min, max, product };

std::size_t size_of(DType dtype);  // bytes of one element
const char* name_of(DType dtype);  // "float32", ...
const char* name_of(ReduceOp op);  // "sum", ...

// `count` elements of `dtype` that the caller owns, aligned to their size.
struct Buffer {
  void* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::float32;

  std::size_t bytes() const { return count * size_of(dtype); }
};

Buffer buffer_of(std::span<float> values);
Buffer buffer_of(std::span<double> values);
Buffer buffer_of(std::span<std::int32_t> values);
Buffer buffer_of(std::span<std::int64_t> values);
Buffer buffer_of(std::span<std::uint8_t> values);
Buffer buffer_of(std::span<std::int8_t> values);
Buffer buffer_of(std::span<std::int16_t> values);
Buffer buffer_of(std::span<bool> values);

}  // namespace lockstep
