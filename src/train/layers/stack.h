// Layers one after the other, made into one torch module.
#pragma once

#include <torch/nn/module.h>

#include <vector>

#include "lockstep/train/layers.h"

namespace lockstep::train {

class StackModule : public torch::nn::Module {
 public:
  // Infers each layer's sizes by sending `input`, a batch of one, through those before it. Throws InvalidArgument
  // naming the layer that cannot take its input.
  StackModule(const std::vector<Layer>& layers, Tensor input);

  Tensor forward(Tensor x) const;

  // What summary prints: a layer's name, its kind, its output's sizes without the batch, its parameters.
  struct Line {
    std::string name, kind;
    std::vector<std::int64_t> output;
    std::int64_t parameters = 0;
  };
  const std::vector<Line>& lines() const { return lines_; }

 private:
  std::vector<std::function<Tensor(const Tensor&)>> forwards_;
  std::vector<Line> lines_;
};

}  // namespace lockstep::train
