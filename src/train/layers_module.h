// Models that are made of layers one after the other, which can be cut into stages.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/strategy/pipeline_stage.h"

namespace lockstep::train {

// Layers `first` to `first + count`, called "0", "1", ... by their numbers in the model.
// Layers one after the other. Their names in the model: "0", "1", ...; or, if they are not `numbered`, those of the
// submodules of each, which differ.
struct Layers {
  std::vector<PipelineStage> layers;
  bool numbered = true;
};

// Some layers of a model as one module.
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
