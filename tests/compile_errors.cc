// Mistakes that must not compile: compile_errors_test.py finds each text after "expect:" among the compiler's errors,
// and counts the errors. A class Model of the user's own is no mistake.
#include <lockstep/lockstep.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <string>

namespace ls = lockstep;

struct Model : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return x; }
};
struct TwoInputs : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor&) { return x; }
};
struct Pair : torch::nn::Module {
  std::pair<torch::Tensor, torch::Tensor> forward(const torch::Tensor& x) { return {x, x}; }
};

void right() {
  const ls::MirroredStrategy strategy;
  ls::Model model([] { return std::make_shared<Model>(); });
  model.compile({.optimizer = "sgd", .loss = std::string("mse")});
  model.compile({.optimizer = ls::SGD(), .loss = [](const torch::Tensor& y_true, const torch::Tensor& y_pred) {
                   return (y_true - y_pred).square();
                 }});
  strategy.replicate([] { return torch::nn::Linear(2, 2); });
  strategy.replicate([] { return std::make_shared<TwoInputs>(); });  // a loop of one's own may call it as it likes
}

void wrong() {
  const ls::MirroredStrategy strategy;
  torch::nn::Linear net(2, 2);
  const auto own = std::make_shared<Model>();

  strategy.replicate(own);                                     // expect: give a function that makes your module
  ls::Model a(net);                                            // expect: give a function that makes your module
  strategy.replicate([] { return 3; });                        // expect: must return a holder
  ls::Model b([] { return Model(); });                         // expect: must return a holder
  ls::Model c([] { return std::make_shared<TwoInputs>(); });   // expect: one input, one output
  ls::ModuleLayer d([] { return std::make_shared<Pair>(); });  // expect: one input, one output
  ls::Loss e([](const torch::Tensor& y) { return y; });        // expect: a loss is a name, a Loss, or a function
  ls::Loss f(3);                                               // expect: a loss is a name, a Loss, or a function
}
