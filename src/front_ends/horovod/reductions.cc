// allreduce and reducescatter.
#include <ATen/core/grad_mode.h>

#include <map>

#include "front_ends/horovod/adasum.h"
#include "front_ends/horovod/in_process_set.h"
#include "front_ends/horovod/operations.h"
#include "front_ends/horovod/session.h"

namespace lockstep::horovod {
namespace {

at::ScalarType sent_type(const Tensor& tensor, Compression compression) {
  if (compression == Compression::none || !tensor.is_floating_point()) return tensor.scalar_type();
  return compression == Compression::fp16 ? at::kHalf : at::kBFloat16;
}

Tensor scaled(const Tensor& tensor, double factor) {
  return factor == 1 ? tensor : tensor.mul(factor).to(tensor.scalar_type());
}

// A task keeps these: a session's own task must not own the session.
ReduceOptions without_set(ReduceOptions options) {
  options.process_set = {};
  return options;
}

// The contiguous copy of a tensor that is sent.
Tensor prepared(const Tensor& tensor, const ReduceOptions& options, bool on_gpu) {
  return scaled(own_copy(tensor, on_gpu), options.prescale_factor).to(sent_type(tensor, options.compression));
}

Tensor finished(const Tensor& reduced, const Tensor& original, const ReduceOptions& options) {
  return scaled(reduced.to(original.scalar_type()), options.postscale_factor).to(original.device());
}

std::string text_of(const char* caller, const Tensors& tensors, const ReduceOptions& options) {
  std::string all = text(caller, named(options.name), " (", name_of(options.op));
  if (options.compression != Compression::none) {
    all += options.compression == Compression::fp16 ? ", sent as fp16" : ", sent as bf16";
  }
  if (options.prescale_factor != 1) all += text(", prescale_factor ", options.prescale_factor);
  if (options.postscale_factor != 1) all += text(", postscale_factor ", options.postscale_factor);
  all += ") of ";
  if (tensors.size() > 1) all += text(tensors.size(), " tensors: ");
  std::vector<std::string> shapes;
  for (const auto& tensor : tensors) shapes.push_back(text(tensor.scalar_type(), " ", tensor.sizes()));
  return all + lockstep::join(shapes);
}

// Runs before anything is announced, so that an invalid call on one rank does not break the others' next call.
void check(const char* caller, const Tensors& tensors, Op op) {
  if (tensors.empty()) throw InvalidArgument(text(caller, ": there are no tensors"));
  for (const auto& tensor : tensors) {
    check_tensor(caller, tensor);
    if (tensor.scalar_type() == at::kBool && op != Min && op != Max) {
      throw InvalidArgument(text(caller, ": bools are reduced by Min (and) and Max (or), not by ", name_of(op)));
    }
  }
}

// Tensors of one dtype that are sent as one.
struct Pack {
  std::vector<std::size_t> tensors;
  Tensor sent;
};

std::vector<Pack> packs_of(const Tensors& tensors, const ReduceOptions& options, bool on_gpu) {
  std::map<at::ScalarType, std::vector<std::size_t>> by_dtype;
  std::vector<Pack> packs;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (options.op == Adasum) {  // which is of a tensor as a whole
      packs.push_back({{i}, prepared(tensors[i], options, on_gpu).view({-1})});
    } else {
      by_dtype[sent_type(tensors[i], options.compression)].push_back(i);
    }
  }
  for (auto& [dtype, indices] : by_dtype) {
    Tensors parts;
    for (const auto i : indices) parts.push_back(prepared(tensors[i], options, on_gpu).view({-1}));
    packs.push_back({std::move(indices), parts.size() == 1 ? parts[0] : at::cat(parts)});
  }
  return packs;
}

Started start_allreduce(const char* caller, const Tensors& tensors, const ReduceOptions& options, bool in_place) {
  const InProcessSet in_set(options.process_set);
  const auto session = Session::current();
  check(caller, tensors, options.op);
  for (const auto& tensor : tensors) {
    if (options.op == Adasum) check_adasum(caller, tensor, session->size());
  }
  auto results = std::make_shared<Tensors>(tensors);
  const at::NoGradGuard no_gradient;
  const auto stream = session->stream_for(tensors);
  const auto packs = packs_of(tensors, options, stream.has_value());
  const auto run = [session = session.get(), caller, tensors, options = without_set(options), in_place, results, packs,
                    on_gpu = stream.has_value()] {
    const at::NoGradGuard without_gradient;
    for (const auto& pack : packs) {
      auto mine = Announcement::of(text_of(caller, tensors, options));
      if (options.op != Adasum) mine.kind = Announcement::Kind::reduction;
      mine.dtype = ops::dtype_of(pack.sent.scalar_type());
      mine.op = reduce_op_of(options.op);
      mine.elements = pack.sent.numel();
      mine.on_gpu = on_gpu;
      const auto sent = as_all_send(pack.sent, session->negotiate(mine));
      if (options.op == Adasum) {
        adasum(*session, sent);
      } else {
        session->carry_out(with_name(sent, options.name, Call::all_reduce(buffer_of(sent), mine.op)));
      }
      std::int64_t at = 0;
      for (const auto i : pack.tensors) {
        const auto& tensor = tensors[i];
        const auto value = finished(sent.narrow(0, at, tensor.numel()).view(tensor.sizes()), tensor, options);
        if (in_place) {
          (*results)[i].detach().copy_(value);
        } else {
          (*results)[i] = value.variable_data();  // not a view: the user may change it in place
        }
        at += tensor.numel();
      }
    }
  };
  auto used = tensors;
  for (const auto& pack : packs) used.push_back(pack.sent);
  return {session->start(stream, run, used, [results] { return *results; }), results};
}

Started start_reducescatter(const char* caller, const Tensors& tensors, const ReduceOptions& options) {
  const InProcessSet in_set(options.process_set);
  const auto session = Session::current();
  check(caller, tensors, options.op);
  if (options.op == Adasum) throw InvalidArgument(text(caller, ": Adasum is an op of allreduce"));
  for (const auto& tensor : tensors) check_rows(caller, tensor);
  auto results = std::make_shared<Tensors>(tensors.size());
  const at::NoGradGuard no_gradient;
  const auto stream = session->stream_for(tensors);
  Tensors inputs;
  for (const auto& tensor : tensors) inputs.push_back(prepared(tensor, options, stream.has_value()));
  const auto run = [session = session.get(), caller, tensors, options = without_set(options), results, inputs,
                    on_gpu = stream.has_value()] {
    const at::NoGradGuard without_gradient;
    const auto ranks = session->size();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto& tensor = tensors[i];
      const auto rows = tensor.size(0);
      std::vector<std::int64_t> shares;
      for (int r = 0; r < ranks; ++r) shares.push_back(rows / ranks + (r < rows % ranks ? 1 : 0));
      auto mine = Announcement::of(text_of(caller, tensors, options));
      mine.on_gpu = on_gpu;
      const auto input = as_all_send(inputs[i], session->negotiate(mine));
      const auto output =
          at::empty(with_rows(tensor, shares[static_cast<std::size_t>(session->rank())]), input.options());
      session->carry_out(with_name(input, options.name,
                                   Call::reduce_scatter(buffer_of(input), buffer_of(output), reduce_op_of(options.op),
                                                        counts_of(shares, elements_of_row(tensor)))));
      (*results)[i] = finished(output, tensor, options);
    }
  };
  return {session->start(stream, run, inputs, [results] { return *results; }), results};
}

void require_gradient(const char* caller, Op op) {
  if (op == Average || op == Sum) return;
  throw InvalidArgument(text(caller, " by ", name_of(op), " has no gradient; Average and Sum have one"));
}

Tensors scattered(const char* caller, const Tensors& tensors, const ReduceOptions& options) {
  const auto run = [&] { return start_reducescatter(caller, tensors, options).all().wait(); };
  return differentiable(tensors, run, [caller, options](const Tensors& gradients, const auto&) {
    require_gradient(caller, options.op);
    const double factor = options.prescale_factor * options.postscale_factor *
                          (options.op == Sum ? static_cast<double>(options.process_set.size()) : 1);
    Tensors scaled_gradients;
    for (const auto& gradient : gradients) scaled_gradients.push_back(scaled(gradient, factor));
    return grouped_allgather(scaled_gradients, name_of_backward(options.name), options.process_set);
  });
}

Tensors reduced(const char* caller, const Tensors& tensors, const ReduceOptions& options) {
  const auto run = [&] { return start_allreduce(caller, tensors, options, false).all().wait(); };
  return differentiable(tensors, run, [caller, options](const Tensors& gradients, const auto&) {
    require_gradient(caller, options.op);
    auto of_backward = options;
    of_backward.name = name_of_backward(options.name);
    return grouped_allreduce(gradients, of_backward);
  });
}

constexpr const char* kSparse = "sparse_allreduce";

// Every rank gets the entries of all.
Handle<Tensor> start_sparse_allreduce(const Tensor& tensor, const ReduceOptions& options) {
  const InProcessSet in_set(options.process_set);
  const auto session = Session::current();
  if (!tensor.defined() || !tensor.is_sparse())
    throw InvalidArgument(text(kSparse, ": the tensor must be sparse (COO); allreduce is for dense ones"));
  if (options.op == Average && !tensor.is_floating_point())
    throw InvalidArgument(text(kSparse, ": an average of integers would round each entry; take Sum"));
  if (options.op != Sum && options.op != Average)
    throw InvalidArgument(text(kSparse, ": op is ", name_of(options.op), "; it must be Sum or Average"));
  const auto result = std::make_shared<Tensor>();
  const at::NoGradGuard no_gradient;
  const auto stream = session->stream_for({tensor});
  const auto indices = own_copy(tensor._indices().t(), stream.has_value());
  const auto values = prepared(tensor._values(), options, stream.has_value());
  const auto run = [session = session.get(), options = without_set(options), result, tensor = tensor.detach(), indices,
                    values, on_gpu = stream.has_value()] {
    const at::NoGradGuard without_gradient;
    auto mine = Announcement::of(text(kSparse, named(options.name), " (", name_of(options.op), ") of ",
                                      tensor.scalar_type(), " ", tensor.sizes(), ", ", tensor.sparse_dim(),
                                      " sparse dimensions, sent as ", values.scalar_type()));
    mine.own = values.size(0);
    mine.on_gpu = on_gpu;
    const auto all = session->negotiate(mine);
    std::vector<std::int64_t> entries;
    std::int64_t entries_of_all = 0;
    for (const auto& theirs : all) {
      entries.push_back(theirs.own);
      entries_of_all += theirs.own;
    }
    const auto gather = [&](const Tensor& own) {
      const auto rows = as_all_send(own, all);
      const auto gathered = at::empty(with_rows(rows, entries_of_all), rows.options());
      session->carry_out(
          with_name(rows, options.name,
                    Call::all_gather(buffer_of(rows), buffer_of(gathered), counts_of(entries, elements_of_row(rows)))));
      return gathered;
    };
    const auto of_all = gather(indices).t();
    const auto sums = gather(values).to(tensor.scalar_type());
    const double divisor = options.op == Average ? session->size() : 1;
    *result = at::_sparse_coo_tensor_unsafe(  // checks no index again, for which the host would wait
                  of_all, scaled(sums.div(divisor).to(tensor.scalar_type()), options.postscale_factor), tensor.sizes())
                  .to(tensor.device());
  };
  const auto tensors_of_result = [result] { return Tensors{result->_indices(), result->_values()}; };
  return {session->start(stream, run, {indices, values}, tensors_of_result), result};
}

}  // namespace

Handle<Tensor> sparse_allreduce_async(const Tensor& tensor, const ReduceOptions& options) {
  return start_sparse_allreduce(tensor, options);
}
Tensor sparse_allreduce(const Tensor& tensor, const ReduceOptions& options) {
  return start_sparse_allreduce(tensor, options).wait();
}

Handle<Tensor> allreduce_async(const Tensor& tensor, const ReduceOptions& options) {
  return start_allreduce("allreduce", {tensor}, options, false).only();
}
Handle<Tensor> allreduce_async_(Tensor tensor, const ReduceOptions& options) {
  return start_allreduce("allreduce", {std::move(tensor)}, options, true).only();
}
Handle<Tensors> grouped_allreduce_async(const Tensors& tensors, const ReduceOptions& options) {
  return start_allreduce("grouped_allreduce", tensors, options, false).all();
}
Handle<Tensors> grouped_allreduce_async_(Tensors tensors, const ReduceOptions& options) {
  return start_allreduce("grouped_allreduce", tensors, options, true).all();
}
Handle<Tensor> reducescatter_async(const Tensor& tensor, const ReduceOptions& options) {
  return start_reducescatter("reducescatter", {tensor}, options).only();
}
Handle<Tensors> grouped_reducescatter_async(const Tensors& tensors, const ReduceOptions& options) {
  return start_reducescatter("grouped_reducescatter", tensors, options).all();
}

Tensor allreduce(const Tensor& tensor, const ReduceOptions& options) {
  return reduced("allreduce", {tensor}, options)[0];
}
Tensor allreduce_(Tensor tensor, const ReduceOptions& options) {
  return allreduce_async_(std::move(tensor), options).wait();
}
Tensors grouped_allreduce(const Tensors& tensors, const ReduceOptions& options) {
  return reduced("grouped_allreduce", tensors, options);
}
Tensors grouped_allreduce_(Tensors tensors, const ReduceOptions& options) {
  return grouped_allreduce_async_(std::move(tensors), options).wait();
}
Tensor reducescatter(const Tensor& tensor, const ReduceOptions& options) {
  return scattered("reducescatter", {tensor}, options)[0];
}
Tensors grouped_reducescatter(const Tensors& tensors, const ReduceOptions& options) {
  return scattered("grouped_reducescatter", tensors, options);
}

}  // namespace lockstep::horovod
