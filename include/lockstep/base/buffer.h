// The memory that a Group moves: the caller owns it, and it has an element type. Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

namespace lockstep {

// boolean: a byte that is 0 or 1, which is reduced by min (and) and max (or) alone.
enum class DType : std::uint8_t { float32, float64, float16, bfloat16, int32, int64, uint8, int8, int16, boolean };
inline constexpr int kDTypes = static_cast<int>(DType::boolean) + 1;
enum class ReduceOp : std::uint8_t { sum, mean, min, max, product };

std::size_t size_of(DType dtype);  // bytes of one element
const char* name_of(DType dtype);  // "float32", ...
const char* name_of(ReduceOp op);  // "sum", ...

// Whose memory it is: the host's, or that of the CUDA device with this number.
struct MemoryDevice {
  enum class Type : std::uint8_t { host, cuda };
  Type type = Type::host;
  std::int16_t index = 0;  // 16 bits keep a Buffer at 24 bytes

  bool operator==(const MemoryDevice&) const = default;
};
std::string name_of(MemoryDevice device);  // "host", "cuda:1"

// `count` elements of `dtype` that the caller owns and that are only read, aligned to their size.
struct ConstBuffer {
  const void* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::float32;
  MemoryDevice device = {};

  std::size_t bytes() const { return count * size_of(dtype); }
};

// A ConstBuffer that may also be written.
struct Buffer {
  void* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::float32;
  MemoryDevice device = {};

  std::size_t bytes() const { return count * size_of(dtype); }
  operator ConstBuffer() const { return {data, count, dtype, device}; }  // NOLINT(google-explicit-constructor)
};

namespace internal {
template <class T>
inline constexpr auto dtype_of = nullptr;  // there is none
template <>
inline constexpr auto dtype_of<float> = DType::float32;
template <>
inline constexpr auto dtype_of<double> = DType::float64;
template <>
inline constexpr auto dtype_of<std::int32_t> = DType::int32;
template <>
inline constexpr auto dtype_of<std::int64_t> = DType::int64;
template <>
inline constexpr auto dtype_of<std::uint8_t> = DType::uint8;
template <>
inline constexpr auto dtype_of<std::int8_t> = DType::int8;
template <>
inline constexpr auto dtype_of<std::int16_t> = DType::int16;
template <>
inline constexpr auto dtype_of<bool> = DType::boolean;

template <class T>
concept Element = std::is_same_v<decltype(dtype_of<std::remove_const_t<T>>), const DType>;
}  // namespace internal

// Returns a Buffer of a span, vector or array, or a ConstBuffer where its elements are const. The memory must outlive
// the buffer; elements are float, double, bool or an integer type that DType has.
template <internal::Element T, std::size_t size>
auto buffer_of(std::span<T, size> values) {
  using To = std::conditional_t<std::is_const_v<T>, ConstBuffer, Buffer>;
  return To{values.data(), values.size(), internal::dtype_of<std::remove_const_t<T>>};
}
template <class Values>
auto buffer_of(Values& values) -> decltype(buffer_of(std::span(values))) {
  return buffer_of(std::span(values));
}

}  // namespace lockstep
