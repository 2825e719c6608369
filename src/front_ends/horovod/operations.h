// Horovod's operations share these: tensors as operations take them, gradients, bytes, and how both kinds of
// DistributedOptimizer read their options.
#pragma once

#include <ATen/Functions.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/text.h"
#include "data/stored_tensor.h"
#include "front_ends/horovod/session.h"
#include "lockstep/base/error.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "lockstep/horovod.h"
#include "ops/tensors.h"

namespace lockstep::horovod {

// A contiguous copy for the thread that carries operations out: on the GPU, or in host memory.
inline Tensor own_copy(const Tensor& tensor, bool on_gpu) {
  const auto values = tensor.detach();
  return (on_gpu ? values : values.to(at::kCPU)).clone(at::MemoryFormat::Contiguous);
}

// Returns what a rank sends that has `own`. It is in host memory where the tensors of some ranks are not on their GPUs.
inline Tensor as_all_send(const Tensor& own, const std::vector<Announcement>& all) {
  return are_on_gpus(all) ? own : own.to(at::kCPU);
}

inline void check_tensor(const char* caller, const Tensor& tensor) {
  if (!tensor.defined()) throw InvalidArgument(text(caller, ": the tensor is undefined"));
  if (tensor.is_sparse())
    throw InvalidArgument(text(caller, ": the tensor is sparse; use sparse_allreduce, or make it dense first"));
  ops::dtype_of(tensor.scalar_type());
}

inline void check_rows(const char* caller, const Tensor& tensor) {
  check_tensor(caller, tensor);
  if (tensor.dim() == 0) throw InvalidArgument(text(caller, ": the tensor is a scalar; it needs a first dimension"));
}

inline void check_root(const std::string& caller, int root_rank, int size) {
  require(root_rank >= 0 && root_rank < size, caller + ": root_rank", root_rank, "from 0 to ", size - 1);
}

inline std::int64_t elements_of_row(const Tensor& tensor) { return c10::multiply_integers(tensor.sizes().slice(1)); }

inline std::vector<std::int64_t> with_rows(const Tensor& tensor, std::int64_t rows) {
  auto sizes = tensor.sizes().vec();
  sizes[0] = rows;
  return sizes;
}

inline Counts counts_of(const std::vector<std::int64_t>& rows, std::int64_t elements_of_row) {
  Counts counts;
  for (const auto count : rows) counts.push_back(static_cast<std::size_t>(count * elements_of_row));
  return counts;
}

// A call for `sent` whose tensors have a name in timelines, as horovod.torch's do.
inline Call with_name(const Tensor& sent, const std::string& name, Call call) {
  call = on_stream_of(sent, std::move(call));
  if (!name.empty()) call.tensors = std::make_shared<std::string>(name);
  return call;
}

// Names tell ranks whose backwards come to two calls in another order.
inline std::string name_of_backward(const std::string& name) { return name.empty() ? "" : "backward of " + name; }

// How calls are announced.
inline std::string named(const std::string& name) { return name.empty() ? "" : text(" \"", name, "\""); }
inline std::string rows_of(const Tensor& tensor) {
  return text(tensor.scalar_type(), " [rows", tensor.dim() > 1 ? ", " : "", lockstep::join(tensor.sizes().slice(1)),
              "]");
}

// An operation under way, of several tensors or of one.
struct Started {
  Work work;
  std::shared_ptr<Tensors> results;

  Handle<Tensors> all() const { return {work, results}; }
  Handle<Tensor> only() const { return {work, std::shared_ptr<Tensor>(results, results->data())}; }
};

// Maps the gradients of the floating-point results, whose indices are in `which`, to the gradients of the inputs with
// the same indices. All ranks call it in their backward.
using Backward = std::function<Tensors(const Tensors& gradients, const std::vector<std::size_t>& which)>;

// Returns the results of `operation` on `inputs`, one for each, in autograd's graph where an input requires a gradient.
Tensors differentiable(const Tensors& inputs, const std::function<Tensors()>& operation, const Backward& backward);

// Returns, on all ranks, what `make` returns on root. `call` describes the operation to the others. An exception of
// `make` is an InvalidArgument on the others.
std::string broadcast_bytes(const std::string& call, const std::function<std::string()>& make, int root_rank);

inline std::optional<DType> sent_dtype(Compression compression) {
  switch (compression) {
    case Compression::none: return std::nullopt;
    case Compression::fp16: return DType::float16;
    case Compression::bf16: return DType::bfloat16;
  }
  return std::nullopt;
}

inline ReduceOp reduce_op_of(Op op) {
  switch (op) {
    case Op::average: return ReduceOp::mean;
    case Op::min: return ReduceOp::min;
    case Op::max: return ReduceOp::max;
    case Op::product: return ReduceOp::product;
    default: return ReduceOp::sum;
  }
}

inline void check_gradient_op(Op op) {
  require(op == Average || op == Sum, "DistributedOptimizer: op", name_of(op), "Average or Sum");
}

}  // namespace lockstep::horovod
