// Embeddings in a table that is spread over parameter servers, and may be larger than any process's memory.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "lockstep/base/buffer.h"
#include "lockstep/ops/tensor.h"
#include "lockstep/parameter_server/row_initializer.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

namespace servers {
class EmbeddingModule;
}

struct ShardedEmbeddingOptions {
  RowInitializer embeddings_initializer = "uniform";
  DType dtype = DType::float32;  // or float64

  // Row admission and eviction (Liu et al., "Monolith: real time recommendation system with collisionless embedding
  // table", 2022). A row has memory from its admit_after-th update on, and is not trained before; 0 and 1: from the
  // first. A row that has not been updated for evict_after steps loses what it has learnt; 0: never.
  std::int64_t admit_after = 0;
  std::int64_t evict_after = 0;

  std::optional<std::uint64_t> seed = {};  // of initial values; without: from set_random_seed
};

// A table of ids from 0 to input_dim - 1, with a row of output_dim elements each. A step reads and updates the rows of
// its batch alone, each once however often the batch has its id. Rows are made by their first update, and read as their
// initial values before: memory, traffic and time follow the rows that are used, and not input_dim.
//
// Rows of a batch move by the model's optimizer, and so does their state. All others stay as they are, state included
// ("lazy" Adam: no momentum moves a row that is not in the batch). The optimizer's step counts all steps.
//
// For ParameterServerStrategy; `compile` throws InvalidArgument for any other, and where the model is compiled again:
// its rows are on servers. Checkpoints have the rows, save_weights cannot save them. Before `compile` all rows are 0.
//
// A handle of a module: a layer of Sequential, or a member of a module of your own, registered there:
//   register_module("embedding", embedding.ptr());
class ShardedEmbedding {
 public:
  // Throws InvalidArgument for sizes that are not positive, and options that are negative.
  ShardedEmbedding(std::int64_t input_dim, std::int64_t output_dim, ShardedEmbeddingOptions options = {});

  // Integers [...] to [..., output_dim], on the device of `ids`. One thread at a time. Throws InvalidArgument for an id
  // that is out of range, and what the calls to servers throw.
  Tensor operator()(const Tensor& ids) const;

  std::shared_ptr<torch::nn::Module> ptr() const;

  // Another module of the same sizes and options.
  ShardedEmbedding copy() const;

 private:
  std::shared_ptr<servers::EmbeddingModule> module_;
};

}  // namespace lockstep
