#include "lockstep/ddp/diloco.h"

#include <torch/nn/module.h>

#include <algorithm>

#include "base/text.h"
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
    const bool is_tied = std::ranges::any_of(trained.tensors, [&](const auto& one) { return one.is_same(tensor); });
    if (!tensor.requires_grad() || is_tied) continue;
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

}  // namespace

class DiLoCo::Impl {
 public:
  Impl(const torch::OrderedDict<std::string, Tensor>& parameters, const Communicator& ranks,
       const DiLoCoOptions& options)
      : parameters_(parameters), trained_(checked(parameters, ranks, options)) {
    for (const auto& each : parameters_) were_trained_.push_back(each.value().requires_grad());
    outer_.emplace(trained_.tensors, ranks, options, "the parameters");
  }

  bool step() {
    require_same_trained();
    outer_->advance();
    return outer_->is_together();
  }
  gradient::OuterStep& outer() { return *outer_; }

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
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const auto& each = parameters_[i];
      const bool was_trained = were_trained_[i];
      if (each.value().requires_grad() == was_trained) continue;
      throw InvalidArgument(text("DiLoCo: the parameter \"", each.key(), "\" ",
                                 was_trained ? "was trained when this was made, and is frozen now"
                                             : "was frozen when this was made, and requires a gradient now",
                                 ": make a new DiLoCo"));
    }
  }

  const torch::OrderedDict<std::string, Tensor> parameters_;
  const Trained trained_;           // each once
  std::vector<bool> were_trained_;  // [parameter]
  std::optional<gradient::OuterStep> outer_;
};

DiLoCo::DiLoCo(const torch::OrderedDict<std::string, Tensor>& parameters, Communicator ranks, DiLoCoOptions options)
    : impl_(std::make_shared<Impl>(parameters, ranks, options)) {}

bool DiLoCo::step() { return impl_->step(); }
void DiLoCo::meet() { impl_->outer().meet(); }
std::int64_t DiLoCo::steps() const { return impl_->outer().steps(); }

Trackable DiLoCo::trackable() const {
  const auto load = [impl = impl_](const Archive& archive, const std::string& prefix) -> std::function<void()> {
    return [impl, change = impl->outer().load(archive, prefix)] { change(); };
  };
  return {.save = [impl = impl_](Archive& archive, const std::string& prefix) { impl->outer().save(archive, prefix); },
          .load = load,
          .ranks = impl_->outer().ranks()};
}

}  // namespace lockstep
