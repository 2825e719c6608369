#include "lockstep/group.h"

#include "base/text.h"
#include "collective/backend.h"

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
    case DType::bfloat16: return 2;
    case DType::uint8: return 1;
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

Buffer buffer_of(std::span<float> values) { return make_buffer(values, DType::float32); }
Buffer buffer_of(std::span<double> values) { return make_buffer(values, DType::float64); }
Buffer buffer_of(std::span<std::int32_t> values) { return make_buffer(values, DType::int32); }
Buffer buffer_of(std::span<std::int64_t> values) { return make_buffer(values, DType::int64); }
Buffer buffer_of(std::span<std::uint8_t> values) { return make_buffer(values, DType::uint8); }

int Group::rank() const { return backend_->rank(); }
int Group::size() const { return backend_->size(); }

void Group::all_reduce(Buffer buffer, ReduceOp op, Deadline deadline) const {
  backend_->all_reduce(buffer, op, deadline);
}

void Group::broadcast(Buffer buffer, int root, Deadline deadline) const { backend_->broadcast(buffer, root, deadline); }

void Group::all_gather(Buffer input, Buffer output, Deadline deadline) const {
  backend_->all_gather(input, output, deadline);
}

void Group::reduce_scatter(Buffer input, Buffer output, ReduceOp op, Deadline deadline) const {
  backend_->reduce_scatter(input, output, op, deadline);
}

void Group::barrier(Deadline deadline) const { backend_->barrier(deadline); }
void Group::abort(const std::string& reason) const { backend_->abort(reason); }

}  // namespace lockstep
