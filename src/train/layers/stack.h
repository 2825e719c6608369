// Layers one after the other, made into one torch module.
#pragma once

#include <torch/nn/module.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/data/dataset.h"
#include "lockstep/strategy/pipeline_stage.h"
#include "lockstep/train/layers.h"

namespace lockstep::train {

// Layers one after the other, of a model that can be cut into stages. Their names in the model: "0", "1", ...; or, if
// they are not `numbered`, those of the submodules of each, which differ.
struct Layers {
  std::vector<PipelineStage> layers;
  bool numbered = true;
};

// Layers `first` to `first + count` of a model as one module. They are called "0", "1", ... by their numbers in the
// model.
struct LayersModule : torch::nn::Module {
  LayersModule(const std::vector<PipelineStage>& all, std::size_t first, std::size_t count) {
    for (std::size_t i = first; i < first + count; ++i) {
      layers.push_back(all[i]);
      modules.push_back(register_module(std::to_string(i), all[i].make()));
    }
  }
  Tensor forward(Tensor x) {
    for (std::size_t i = 0; i < layers.size(); ++i) x = layers[i].forward(*modules[i], x);
    return x;
  }

  std::vector<PipelineStage> layers;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
};

}  // namespace lockstep::train

namespace lockstep::internal {

// The state that all handles of a layer share.
struct LayerUse {
  std::atomic<std::int64_t> model = 0;  // the number of the model that has its weights; 0: none yet

  static LayerUse& of(const Layer& layer) { return *layer.use_; }
};

}  // namespace lockstep::internal

namespace lockstep::train {

// Throws InvalidArgument where another model than `model` has the weights of one of the layers, or of one within it.
void require_free(const std::vector<Layer>& layers, std::int64_t model);

// Gives the layers, and those within them, to the model; with model 0 to nobody.
void give_to(const std::vector<Layer>& layers, std::int64_t model);

class StackModule : public torch::nn::Module {
 public:
  // Infers each layer's sizes by sending `input`, a batch of one, through the layers before it. A layer that comes
  // again, here or in a stack within this one, is the module that was made for it first. Throws InvalidArgument naming
  // the layer that cannot take its input.
  StackModule(const std::vector<Layer>& layers, Tensor input);

  Tensor forward(Tensor x) const;

  // A piece of `forward`, which computes one piece after the other: a layer, or several that share one operator; with
  // the submodules that the piece uses, modules of this one.
  struct Piece {
    std::function<Tensor(const Tensor&)> forward;
    std::size_t layers = 1;
    std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> modules = {};
  };
  const std::vector<Piece>& pieces() const { return pieces_; }

  // A line of summary: a layer's name, its kind, its output's sizes without the batch, its parameters.
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

// Returns the pieces of a StackModule for batches like `sample`, which Pipelines can have as layers.
Layers pieces_of(const std::vector<Layer>& layers, const Example& sample);

}  // namespace lockstep::train
