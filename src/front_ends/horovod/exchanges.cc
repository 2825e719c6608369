#include "front_ends/horovod/in_process_set.h"
#include "front_ends/horovod/operations.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <numeric>

#include "front_ends/horovod/session.h"

namespace lockstep::horovod {

namespace {

// A Backward as a node of the graph holds it.
struct KeptBackward : torch::CustomClassHolder {
  explicit KeptBackward(Backward function) : call_(std::move(function)), session_(Session::current()) {}

  // Among the ranks of the forward: backward runs in a GPU's own thread.
  Tensors call(const Tensors& gradients, const std::vector<std::size_t>& which) const {
    std::optional<Session::Use> use;
    if (auto session = session_.lock()) use.emplace(std::move(session));
    return call_(gradients, which);
  }

 private:
  const Backward call_;
  const std::weak_ptr<Session> session_;
};

struct Node : torch::autograd::Function<Node> {
  static Tensors forward(torch::autograd::AutogradContext* context, at::TensorList,
                         const std::function<Tensors()>& operation, const Backward& backward) {
    context->saved_data["backward"] = c10::IValue::make_capsule(c10::make_intrusive<KeptBackward>(backward));
    return operation();
  }

  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    const auto kept = context->saved_data["backward"].toCapsule();
    Tensors floating;
    std::vector<std::size_t> which;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].is_floating_point()) continue;
      floating.push_back(gradients[i]);
      which.push_back(i);
    }
    const auto given = static_cast<const KeptBackward&>(*kept).call(floating, which);
    Tensors of_inputs(gradients.size() + 2);  // no gradients for integers, nor for the two functions
    for (std::size_t i = 0; i < which.size(); ++i) of_inputs[which[i]] = given[i];
    return of_inputs;
  }
};

}  // namespace

Tensors differentiable(const Tensors& inputs, const std::function<Tensors()>& operation, const Backward& backward) {
  const bool needed = at::GradMode::is_enabled() && std::any_of(inputs.begin(), inputs.end(), [](const Tensor& input) {
                        return input.defined() && input.requires_grad();
                      });
  return needed ? Node::apply(at::TensorList(inputs), operation, backward) : operation();
}

// allgather, broadcast, alltoall, barrier and join.

namespace {

std::int64_t sum_of(const std::vector<std::int64_t>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), std::int64_t{0});
}

// The place of this rank's rows in a result.
struct Place {
  std::int64_t begin, rows;
};
using Places = std::vector<Place>;

Started start_allgather(const char* caller, const Tensors& tensors, const std::string& name, const ProcessSet& set,
                        const std::shared_ptr<Places>& places = std::make_shared<Places>()) {
  const InProcessSet in_set(set);
  const auto session = Session::current();
  if (tensors.empty()) throw InvalidArgument(text(caller, ": there are no tensors"));
  for (const auto& tensor : tensors) check_rows(caller, tensor);
  const auto stream = session->stream_for(tensors);
  Tensors inputs;
  for (const auto& tensor : tensors) inputs.push_back(own_copy(tensor, stream.has_value()));
  std::vector<std::string> shapes;
  for (const auto& tensor : tensors) shapes.push_back(rows_of(tensor));
  const auto several = tensors.size() > 1 ? text(tensors.size(), " tensors: ") : "";
  auto results = std::make_shared<Tensors>(tensors.size());
  const auto run = [session = session.get(), call = text(caller, named(name), " of ", several, lockstep::join(shapes)),
                    on_gpu = stream.has_value(), tensors, inputs, results, places, name] {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      auto mine = Announcement::of(call);
      mine.own = inputs[i].size(0);
      mine.on_gpu = on_gpu;
      const auto all = session->negotiate(mine);
      const auto input = as_all_send(inputs[i], all);
      std::vector<std::int64_t> rows;
      for (const auto& theirs : all) rows.push_back(theirs.own);
      places->push_back(
          {std::accumulate(rows.begin(), rows.begin() + session->rank(), std::int64_t{0}), input.size(0)});
      const auto output = at::empty(with_rows(input, sum_of(rows)), input.options());
      session->carry_out(with_name(
          input, name, Call::all_gather(buffer_of(input), buffer_of(output), counts_of(rows, elements_of_row(input)))));
      (*results)[i] = output.to(tensors[i].device());
    }
  };
  return {session->start(stream, run, inputs, [results] { return *results; }), results};
}

Handle<Tensor> start_broadcast(const Tensor& tensor, int root_rank, const std::string& name, bool in_place,
                               const ProcessSet& set) {
  const InProcessSet in_set(set);
  const auto session = Session::current();
  check_tensor("broadcast", tensor);
  const int root = InProcessSet::root_of("broadcast", set, root_rank);
  check_root("broadcast", root, session->size());
  auto result = std::make_shared<Tensor>(tensor);
  const auto stream = session->stream_for({tensor});
  const auto own = own_copy(tensor, stream.has_value());
  const auto run = [session = session.get(), root, name, in_place, result, own, on_gpu = stream.has_value()] {
    const at::NoGradGuard no_gradient;
    auto mine = Announcement::of(
        text("broadcast", named(name), " from rank ", root, " of ", own.scalar_type(), " ", own.sizes()));
    mine.on_gpu = on_gpu;
    const auto sent = as_all_send(own, session->negotiate(mine));
    session->carry_out(with_name(sent, name, Call::broadcast(buffer_of(sent), root)));
    if (in_place) {
      result->detach().copy_(sent);
    } else {
      *result = sent.to(result->device());
    }
  };
  return {session->start(stream, run, {own, tensor}, [result] { return Tensors{*result}; }), result};
}

Tensors gathered(const char* caller, const Tensors& tensors, const std::string& name, const ProcessSet& set) {
  const auto places = std::make_shared<Places>();
  const auto run = [&] { return start_allgather(caller, tensors, name, set, places).all().wait(); };
  return differentiable(tensors, run,
                        [places, name, set](const Tensors& gradients, const std::vector<std::size_t>& which) {
                          auto own = grouped_allreduce(gradients, {.name = name_of_backward(name), .process_set = set});
                          for (std::size_t i = 0; i < own.size(); ++i) {
                            const auto& place = (*places)[which[i]];
                            own[i] = own[i].narrow(0, place.begin, place.rows);
                          }
                          return own;
                        });
}

std::vector<std::int64_t> checked_splits(const Tensor& tensor, std::vector<std::int64_t> splits, int ranks) {
  const auto rows = tensor.size(0);
  if (splits.empty()) {
    if (rows % ranks != 0) {
      throw InvalidArgument(text("alltoall: ", rows, " rows cannot be divided among ", ranks, " ranks; give splits"));
    }
    splits.assign(static_cast<std::size_t>(ranks), rows / ranks);
  }
  const bool negative = std::any_of(splits.begin(), splits.end(), [](auto count) { return count < 0; });
  if (static_cast<int>(splits.size()) != ranks || negative || sum_of(splits) != rows) {
    throw InvalidArgument(text("alltoall: splits are ", lockstep::join(splits), "; they must be ", ranks,
                               " numbers, 0 or more, whose sum is the tensor's first dimension, ", rows));
  }
  return splits;
}

}  // namespace

Handle<Tensor> allgather_async(const Tensor& tensor, const std::string& name, const ProcessSet& set) {
  return start_allgather("allgather", {tensor}, name, set).only();
}
Handle<Tensors> grouped_allgather_async(const Tensors& tensors, const std::string& name, const ProcessSet& set) {
  return start_allgather("grouped_allgather", tensors, name, set).all();
}
Handle<Tensor> broadcast_async(const Tensor& tensor, int root_rank, const std::string& name, const ProcessSet& set) {
  return start_broadcast(tensor, root_rank, name, false, set);
}
Handle<Tensor> broadcast_async_(Tensor tensor, int root_rank, const std::string& name, const ProcessSet& set) {
  return start_broadcast(tensor, root_rank, name, true, set);
}

Handle<AlltoallResult> alltoall_async(const Tensor& tensor, const std::vector<std::int64_t>& splits,
                                      const std::string& name, const ProcessSet& set) {
  const InProcessSet in_set(set);
  const auto session = Session::current();
  check_rows("alltoall", tensor);
  auto result = std::make_shared<AlltoallResult>();
  const auto sent_rows = checked_splits(tensor, splits, session->size());
  const auto stream = session->stream_for({tensor});
  const auto own = own_copy(tensor, stream.has_value());
  const auto run = [session = session.get(), name, result, device = tensor.device(), own, on_gpu = stream.has_value(),
                    sent = sent_rows]() mutable {
    auto mine = Announcement::of(text("alltoall", named(name), " of ", rows_of(own)));
    mine.on_gpu = on_gpu;
    const auto input = as_all_send(own, session->negotiate(mine));
    auto& received = result->received_splits;
    received.resize(sent.size());
    session->carry_out(Call::all_to_all(buffer_of(std::span(sent)), buffer_of(std::span(received))));
    const auto output = at::empty(with_rows(input, sum_of(received)), input.options());
    const auto row = elements_of_row(input);
    session->carry_out(with_name(
        input, name,
        Call::all_to_all(buffer_of(input), buffer_of(output), counts_of(sent, row), counts_of(received, row))));
    result->output = output.to(device);
  };
  return {session->start(stream, run, {own}, [result] { return Tensors{result->output}; }), result};
}

Tensor allgather(const Tensor& tensor, const std::string& name, const ProcessSet& set) {
  return gathered("allgather", {tensor}, name, set)[0];
}
Tensors grouped_allgather(const Tensors& tensors, const std::string& name, const ProcessSet& set) {
  return gathered("grouped_allgather", tensors, name, set);
}
Tensor broadcast(const Tensor& tensor, int root_rank, const std::string& name, const ProcessSet& set) {
  const auto run = [&] { return Tensors{broadcast_async(tensor, root_rank, name, set).wait()}; };
  return differentiable({tensor}, run, [root_rank, name, set](const Tensors& gradients, const auto&) {
    const auto mean = allreduce(gradients[0], {.name = name_of_backward(name), .process_set = set});
    if (rank() == root_rank) return Tensors{mean};
    return Tensors{mean.masked_fill(at::ones_like(mean, at::kBool), 0)};  // zeros with a second derivative
  })[0];
}
Tensor broadcast_(Tensor tensor, int root_rank, const std::string& name, const ProcessSet& set) {
  return broadcast_async_(std::move(tensor), root_rank, name, set).wait();
}
AlltoallResult alltoall(const Tensor& tensor, const std::vector<std::int64_t>& splits, const std::string& name,
                        const ProcessSet& set) {
  AlltoallResult result;
  const auto received = std::make_shared<std::vector<std::int64_t>>();
  const auto run = [&] {
    result = alltoall_async(tensor, splits, name, set).wait();
    *received = result.received_splits;
    return Tensors{result.output};
  };
  result.output = differentiable({tensor}, run, [received, name, set](const Tensors& gradients, const auto&) {
    return Tensors{alltoall(gradients[0], *received, name_of_backward(name), set).output};
  })[0];
  return result;
}

void barrier(const ProcessSet& set) {
  const InProcessSet in_set(set);
  const auto session = Session::current();
  session->run([session = session.get()] { session->negotiate(Announcement::of("barrier")); });  // all called it
  session->synchronize();
}

int join() { return Session::current()->join(); }

}  // namespace lockstep::horovod
