// "Distribution Strategy API with Estimator", in C++: a model function, an input function, and a strategy in
// RunConfig.
#include <lockstep/estimator.h>
#include <lockstep/lockstep.h>

#include <ATen/Functions.h>

#include <iostream>

namespace ls = lockstep;

namespace {

ls::EstimatorSpec model_fn(const ls::Example& /*features*/, ls::ModeKeys mode, const ls::Params& params) {
  ls::EstimatorSpec spec{.model = ls::Sequential({ls::Dense(1)})};
  if (mode == ls::ModeKeys::predict) {
    spec.predictions = [](const torch::Tensor& outputs) { return ls::Predictions{{"logits", outputs}}; };
    return spec;
  }
  spec.loss = ls::MeanSquaredError();
  if (mode == ls::ModeKeys::train) spec.optimizer = ls::SGD({.learning_rate = params.at("learning_rate")});
  return spec;
}

ls::Dataset input_fn() { return ls::Dataset::from_tensor_slices(at::ones({100, 1}), at::ones({100, 1})).batch(4); }

}  // namespace

int main(int argc, char** argv) {
  try {
    const ls::MirroredStrategy distribution;
    ls::Estimator classifier(
        model_fn, {.model_dir = argc > 1 ? argv[1] : "", .log_step_count_steps = 10, .train_distribute = distribution},
        {{"learning_rate", 0.2}});
    classifier.train(input_fn);
    const auto result = classifier.evaluate(input_fn);
    std::cout << "Eval loss: " << result["loss"] << " at step " << result["global_step"] << "\n";
    std::cout << "1 becomes " << classifier.predict(input_fn).at("logits")[0].item<float>() << "\n";
  } catch (const ls::Error& error) {
    std::cerr << "estimator: " << error.what() << "\n";
    return 1;
  }
}
