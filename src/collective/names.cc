// Names and sizes of the enumerations, and buffers of spans.
#include "base/text.h"
#include "lockstep/error.h"
#include "lockstep/group.h"

namespace lockstep {
namespace {

template <class T>
Buffer make_buffer(std::span<T> values, DType dtype) {
  return {values.data(), values.size(), dtype};
}

}  // namespace

std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::int64: return 8;
    case DType::float32:
    case DType::int32: return 4;
    case DType::float16:
    case DType::bfloat16:
    case DType::int16: return 2;
    case DType::uint8:
    case DType::int8:
    case DType::boolean: return 1;
  }
  throw InvalidArgument(text("DType ", static_cast<int>(dtype), " does not exist"));
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::float32: return "float32";
    case DType::float64: return "float64";
    case DType::float16: return "float16";
    case DType::bfloat16: return "bfloat16";
    case DType::int32: return "int32";
    case DType::int64: return "int64";
    case DType::uint8: return "uint8";
    case DType::int8: return "int8";
    case DType::int16: return "int16";
    case DType::boolean: return "bool";
  }
  return "unknown";
}

const char* name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum: return "sum";
    case ReduceOp::mean: return "mean";
    case ReduceOp::min: return "min";
    case ReduceOp::max: return "max";
    case ReduceOp::product: return "product";
  }
  return "unknown";
}

const char* name_of(Call::Kind kind) {
  switch (kind) {
    case Call::Kind::barrier: return "barrier";
    case Call::Kind::all_reduce: return "all_reduce";
    case Call::Kind::reduce: return "reduce";
    case Call::Kind::broadcast: return "broadcast";
    case Call::Kind::all_gather: return "all_gather";
    case Call::Kind::gather: return "gather";
    case Call::Kind::scatter: return "scatter";
    case Call::Kind::reduce_scatter: return "reduce_scatter";
    case Call::Kind::all_to_all: return "all_to_all";
    case Call::Kind::send: return "send";
    case Call::Kind::recv: return "recv";
  }
  return "unknown";
}

Buffer buffer_of(std::span<float> values) { return make_buffer(values, DType::float32); }
Buffer buffer_of(std::span<double> values) { return make_buffer(values, DType::float64); }
Buffer buffer_of(std::span<std::int32_t> values) { return make_buffer(values, DType::int32); }
Buffer buffer_of(std::span<std::int64_t> values) { return make_buffer(values, DType::int64); }
Buffer buffer_of(std::span<std::uint8_t> values) { return make_buffer(values, DType::uint8); }
Buffer buffer_of(std::span<std::int8_t> values) { return make_buffer(values, DType::int8); }
Buffer buffer_of(std::span<std::int16_t> values) { return make_buffer(values, DType::int16); }
Buffer buffer_of(std::span<bool> values) { return make_buffer(values, DType::boolean); }

Call Call::barrier() { return {}; }

Call Call::all_reduce(Buffer buffer, ReduceOp op) {
  return {.kind = Kind::all_reduce, .input = buffer, .output = buffer, .op = op};
}

Call Call::reduce(Buffer input, Buffer output, ReduceOp op, int root) {
  return {.kind = Kind::reduce, .input = input, .output = output, .op = op, .peer = root};
}

Call Call::broadcast(Buffer buffer, int root) {
  return {.kind = Kind::broadcast, .input = buffer, .output = buffer, .peer = root};
}

Call Call::all_gather(Buffer input, Buffer output, Counts counts) {
  return {.kind = Kind::all_gather, .input = input, .output = output, .counts = std::move(counts)};
}

Call Call::gather(Buffer input, Buffer output, int root, Counts counts) {
  return {.kind = Kind::gather, .input = input, .output = output, .peer = root, .counts = std::move(counts)};
}

Call Call::scatter(Buffer input, Buffer output, int root, Counts counts) {
  return {.kind = Kind::scatter, .input = input, .output = output, .peer = root, .counts = std::move(counts)};
}

Call Call::reduce_scatter(Buffer input, Buffer output, ReduceOp op, Counts counts) {
  return {.kind = Kind::reduce_scatter, .input = input, .output = output, .op = op, .counts = std::move(counts)};
}

Call Call::all_to_all(Buffer input, Buffer output, Counts input_counts, Counts output_counts) {
  return {.kind = Kind::all_to_all,
          .input = input,
          .output = output,
          .counts = std::move(input_counts),
          .output_counts = std::move(output_counts)};
}

Call Call::send(Buffer buffer, int to) {
  return {.kind = Kind::send, .input = buffer, .output = {nullptr, 0, buffer.dtype}, .peer = to};
}

Call Call::recv(Buffer buffer, int from) {
  return {.kind = Kind::recv, .input = {nullptr, 0, buffer.dtype}, .output = buffer, .peer = from};
}

}  // namespace lockstep
