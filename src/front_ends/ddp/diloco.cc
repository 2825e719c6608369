#include "lockstep/ddp/diloco.h"

#include <torch/nn/module.h>

#include <algorithm>

#include "base/text.h"
#include "data/stored_tensor.h"
#include "gradient/outer_step.h"
#include "lockstep/base/error.h"
#include "lockstep/gradient/tensor_collectives.h"

namespace lockstep {
namespace {

struct Trained {
  std::vector<std::string> names;
  std::vector<Tensor> tensors;
};

Trained trained_of(const torch::OrderedDict<std::string, Tensor>& parameters) {
  Trained trained;
  for (const auto& each : parameters) {
    const auto& tensor = each.value();
    if (!tensor.requires_grad()) continue;
    if (tensor.scalar_type() != at::kFloat && tensor.scalar_type() != at::kDouble) {
      throw InvalidArgument(text("DiLoCo: the parameter \"", each.key(), "\" is ", tensor.scalar_type(),
                                 "; trained parameters are float or double"));
    }
    trained.names.push_back(each.key());
    trained.tensors.push_back(tensor);
  }
  if (trained.names.empty()) throw InvalidArgument("DiLoCo: there is no parameter that requires a gradient");
  return trained;
}

std::string describe(const Trained& trained, const DiLoCoOptions& options) {
  auto all = gradient::describe(options);
  for (std::size_t i = 0; i < trained.names.size(); ++i)
    all += text(trained.names[i], " ", trained.tensors[i].scalar_type(), " ", trained.tensors[i].sizes(), "\n");
  return all;
}

std::string joined(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "/" + name;
}

// The archive's tensor in the shape and dtype of `like`.
Tensor load_like(const Archive& archive, const std::string& name, const Tensor& like) {
  const auto loaded = data::from_stored(archive.tensor(name));
  if (loaded.sizes() == like.sizes() && loaded.scalar_type() == like.scalar_type()) return loaded;
  throw InvalidArgument(text("the checkpoint's ", name, " is ", loaded.scalar_type(), " ", loaded.sizes(),
                             "; here it is ", like.scalar_type(), " ", like.sizes()));
}

}  // namespace

class DiLoCo::Impl {
 public:
  Impl(const torch::OrderedDict<std::string, Tensor>& parameters, const Communicator& ranks,
       const DiLoCoOptions& options)
      : parameters_(parameters), trained_(checked(parameters, ranks, options)) {
    const auto name = text("DiLoCo ", ranks.group().next_number() + 1);
    outer_.emplace(trained_.tensors, ranks, options, name);
  }

  bool step() {
    require_same_trained();
    outer_->step();
    return outer_->is_together();
  }
  gradient::OuterStep& outer() { return *outer_; }

  void save(Archive& archive, const std::string& prefix) {
    if (!outer_->is_together()) {
      throw InvalidArgument(
          "DiLoCo: the ranks' values differ between two meetings: save where step() returns true, or after meet()");
    }
    archive.entries[joined(prefix, "steps")] = std::to_string(outer_->steps());
    const auto shared = outer_->shared();
    for (std::size_t i = 0; i < shared.size(); ++i)
      archive.tensors[joined(prefix, text("shared", i))] = data::to_stored(shared[i]);
    const auto& ranks = outer_->ranks();
    const auto lost = own();
    const auto sizes = all_gather(ranks.group(), at::full({1}, lost.numel(), at::kLong), ranks.deadline());
    archive.tensors[joined(prefix, "lost_sizes")] = data::to_stored(sizes);
    archive.tensors[joined(prefix, "lost")] = data::to_stored(all_gather(ranks.group(), lost, ranks.deadline()));
  }

  std::function<void()> load(const Archive& archive, const std::string& prefix) {
    const auto steps = archive.integer(joined(prefix, "steps"));
    std::vector<std::pair<Tensor, Tensor>> copies;  // to, from
    const auto shared = outer_->shared();
    for (std::size_t i = 0; i < shared.size(); ++i)
      copies.emplace_back(shared[i], load_like(archive, joined(prefix, text("shared", i)), shared[i]));
    const auto lost = lost_here(archive, prefix);
    return [this, steps, copies, lost] {
      for (const auto& [to, from] : copies) to.copy_(from);
      std::int64_t at = 0;
      for (auto& tensor : outer_->own()) {
        Tensor(tensor).copy_(lost.narrow(0, at, tensor.numel()).view(tensor.sizes()));
        at += tensor.numel();
      }
      outer_->restore(steps);
    };
  }

 private:
  static Trained checked(const torch::OrderedDict<std::string, Tensor>& parameters, const Communicator& ranks,
                         const DiLoCoOptions& options) {
    gradient::check(options);
    auto trained = trained_of(parameters);
    ranks.check_all_agree("DiLoCo", describe(trained, options));
    std::vector<Tensor> values;
    for (const auto& each : parameters) values.push_back(each.value().detach());
    broadcast(ranks.with_purpose(Purpose("the first values of DiLoCo")), values);
    return trained;
  }

  void require_same_trained() const {
    std::size_t next = 0;
    for (const auto& each : parameters_) {
      const bool was_trained = next < trained_.names.size() && trained_.names[next] == each.key();
      next += was_trained ? 1 : 0;
      if (each.value().requires_grad() == was_trained) continue;
      throw InvalidArgument(text("DiLoCo: the parameter \"", each.key(), "\" ",
                                 was_trained ? "was trained when this was made, and is frozen now"
                                             : "was frozen when this was made, and requires a gradient now",
                                 ": make a new DiLoCo"));
    }
  }

  // What rounding has lost on this rank: flat.
  Tensor own() const {
    std::vector<Tensor> flat{at::empty({0})};
    for (const auto& tensor : outer_->own()) flat.push_back(tensor.view({-1}));
    return at::cat(flat);
  }

  // This rank's part of what was lost; zeros where there were other ranks.
  Tensor lost_here(const Archive& archive, const std::string& prefix) const {
    const auto mine = own();
    const auto all = data::from_stored(archive.tensor(joined(prefix, "lost")));
    const auto sizes = data::from_stored(archive.tensor(joined(prefix, "lost_sizes")));
    const auto rank = outer_->ranks().rank();
    if (sizes.numel() != outer_->ranks().size() || sizes[rank].item<std::int64_t>() != mine.numel())
      return at::zeros_like(mine);
    return all.narrow(0, sizes.narrow(0, 0, rank).sum().item<std::int64_t>(), mine.numel());
  }

  const torch::OrderedDict<std::string, Tensor> parameters_;
  const Trained trained_;
  std::optional<gradient::OuterStep> outer_;
};

DiLoCo::DiLoCo(const torch::OrderedDict<std::string, Tensor>& parameters, Communicator ranks, DiLoCoOptions options)
    : impl_(std::make_shared<Impl>(parameters, ranks, options)) {}

bool DiLoCo::step() { return impl_->step(); }
void DiLoCo::meet() { impl_->outer().meet(); }
std::int64_t DiLoCo::steps() const { return impl_->outer().steps(); }

Trackable DiLoCo::trackable() const {
  return {
      .save = [impl = impl_](Archive& archive, const std::string& prefix) { impl->save(archive, prefix); },
      .load = [impl = impl_](const Archive& archive, const std::string& prefix) { return impl->load(archive, prefix); },
      .ranks = impl_->outer().ranks()};
}

}  // namespace lockstep
