// Layers one after the other, made into one torch module.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/train/layers.h"
#include "parallel/pipeline_model.h"

namespace lockstep::train {

class StackModule : public torch::nn::Module {
 public:
  // Infers each layer's sizes by sending `input`, a batch of one, through those before it. Throws InvalidArgument
  // naming the layer that cannot take its input.
  StackModule(const std::vector<Layer>& layers, Tensor input);

  Tensor forward(Tensor x) const;

  // What `forward` computes one after the other: its pieces, with the submodules that each uses, which are this
  // module's own.
  struct Piece {
    std::function<Tensor(const Tensor&)> forward;
    std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> modules;
  };
  const std::vector<Piece>& pieces() const { return pieces_; }

  // What summary prints: a layer's name, its kind, its output's sizes without the batch, its parameters.
  struct Line {
    std::string name, kind;
    std::vector<std::int64_t> output;
    std::int64_t parameters = 0;
  };
  const std::vector<Line>& lines() const { return lines_; }

 private:
  std::vector<Piece> pieces_;
  std::vector<Line> lines_;
};

// The pieces of such a module for batches like `sample`, which Pipelines can have as layers.
parallel::Layers pieces_of(const std::vector<Layer>& layers, const Example& sample);

}  // namespace lockstep::train
