// Layers that Sequential computes in one pass, against tables that Keras 3 made, in float32: what their kernels take.
#include "golden_tables.h"
#include "gradient/replicated_parameters.h"
#include "strategy/unwrap.h"

namespace lockstep {
namespace {

TEST(Golden, Stacks) {
  for (const auto& row : rows_of("stacks")) {
    for (const int replicas : {1, 3}) {
      const std::string what = row["layers"].dump();
      const MirroredStrategy strategy(replicas);
      const auto scope = strategy.scope();
      const auto x = tensor_of(row["input"]).to(at::kFloat);
      std::vector<Layer> layers;
      for (const auto& layer : row["layers"]) layers.push_back(layer_of(layer["kind"], layer["options"]));
      Sequential model(layers);
      model.build(x.sizes().slice(1).vec());
      auto& parameters = unwrap(model.module());
      ASSERT_EQ(parameters.slots().size(), row["weights"].size()) << what;
      for (std::size_t i = 0; i < parameters.slots().size(); ++i) {
        parameters.assign(i, tensor_of(row["weights"][i]).to(at::kFloat));
      }
      expect_close(model.predict(Dataset::from_tensor_slices(x).batch(x.size(0))), tensor_of(row["output"]), 2e-6,
                   what);
      model.compile({.optimizer = SGD({.learning_rate = 1}), .loss = inner_product()});
      model.train_on_batch({x, tensor_of(row["cotangent"]).to(at::kFloat)});
      for (std::size_t i = 0; i < parameters.slots().size(); ++i) {
        const auto gradient = tensor_of(row["weights"][i]) - parameters.parameter(0, i).to(at::kDouble);
        expect_close(gradient, tensor_of(row["weight_gradients"][i]), 5e-6,
                     what + ": gradient of " + parameters.slots()[i].name);
      }
    }
  }
}

}  // namespace
}  // namespace lockstep
