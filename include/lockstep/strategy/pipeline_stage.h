// A layer, or several, of a model that may be cut into stages (lockstep/parallel/pipeline.h).
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "lockstep/ops/tensor.h"
#include "lockstep/strategy/module_factory.h"

namespace lockstep {

// A stage: `factory` returns a module holder or a shared_ptr to a module with `Tensor forward(Tensor)`.
class PipelineStage {
 public:
  template <class Factory>
  PipelineStage(const Factory& factory)  // NOLINT: a stage is the function that makes it
      : make_(internal::maker(factory)), forward_(internal::forward_of<Factory>()) {}

  std::shared_ptr<torch::nn::Module> make() const { return make_(); }
  Tensor forward(torch::nn::Module& module, const Tensor& x) const { return forward_(module, x); }
  const internal::ForwardOfModule& forward_function() const { return forward_; }

  // This stage, where `change` gets each module that is made.
  PipelineStage with(std::function<void(torch::nn::Module&)> change) const {
    auto stage = *this;
    stage.make_ = [make = make_, change = std::move(change)] {
      auto module = make();
      change(*module);
      return module;
    };
    return stage;
  }

  // This stage, whose forward becomes around(forward), which calls `forward`, for example under autocast.
  PipelineStage with_forward(std::function<Tensor(const std::function<Tensor()>& forward)> around) const {
    auto stage = *this;
    stage.forward_ = [forward = forward_, around = std::move(around)](torch::nn::Module& module, const Tensor& x) {
      return around([&] { return forward(module, x); });
    };
    return stage;
  }

  // Gives up the function that makes modules, and what it holds.
  void forget_make() { make_ = nullptr; }

 private:
  internal::MakeModule make_;
  internal::ForwardOfModule forward_;
};

}  // namespace lockstep
