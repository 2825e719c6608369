// Every layer, loss, metric, optimizer and schedule against tables that Keras 3 made (tools/golden/make.py), in double
// precision, on 1 and 3 replicas.
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include "golden_tables.h"
#include "gradient/replicated_parameters.h"
#include "strategy/unwrap.h"

namespace lockstep {
namespace {

// --- layers

// The tensors of a model by their names without the layer's.
std::map<std::string, Tensor> tensors_of(const Model& model) {
  std::map<std::string, Tensor> tensors;
  const auto& parameters = unwrap(model.module());
  const auto last = [](const std::string& name) { return name.substr(name.rfind('.') + 1); };
  for (std::size_t i = 0; i < parameters.slots().size(); ++i)
    tensors[last(parameters.slots()[i].name)] = parameters.parameter(0, i);
  for (std::size_t i = 0; i < parameters.buffer_names().size(); ++i)
    tensors[last(parameters.buffer_names()[i])] = parameters.buffer(0, i);
  return tensors;
}

void set_weights(const Model& model, const Json& weights) {
  auto& parameters = unwrap(model.module());
  const auto last = [](const std::string& name) { return name.substr(name.rfind('.') + 1); };
  for (std::size_t i = 0; i < parameters.slots().size(); ++i)
    parameters.assign(i, tensor_of(weights.at(last(parameters.slots()[i].name))));
  for (std::size_t i = 0; i < parameters.buffer_names().size(); ++i) {
    parameters.assign_buffer(i, tensor_of(weights.at(last(parameters.buffer_names()[i]))));
  }
}

void check_layer(const Json& row, int replicas) {
  const std::string what =
      row["kind"].get<std::string>() + row["options"].dump() + (row["training"] ? ", training" : "");
  const bool batch_statistics = row["kind"] == "BatchNormalization" && row["training"];
  const MirroredStrategy strategy(replicas);
  const auto scope = strategy.scope();
  const auto x = tensor_of(row["input"]);
  Sequential model({layer_of(row["kind"], row["options"])});
  model.build(x.sizes().slice(1).vec(), x.scalar_type());
  set_weights(model, row["weights"]);
  if (!row["training"]) {
    const auto output = model.predict(Dataset::from_tensor_slices(x).batch(x.size(0)));
    expect_close(output, tensor_of(row["output"]), 1e-8, what + ": output");
    if (row["kind"] == "BatchNormalization") return;  // training steps would use the batch's statistics
  }
  if (row["weight_gradients"].empty()) return;
  if (batch_statistics && replicas > 1) return;  // each replica's statistics are its own
  model.compile({.optimizer = SGD({.learning_rate = 1}), .loss = inner_product()});
  model.train_on_batch({x, tensor_of(row["cotangent"])});
  for (const auto& [name, gradient] : row["weight_gradients"].items()) {
    expect_close(tensor_of(row["weights"][name]) - tensors_of(model).at(name), tensor_of(gradient), 1e-8,
                 what + ": gradient of " + name);
  }
  if (!batch_statistics) return;
  for (const char* name : {"running_mean", "running_var"}) {
    expect_close(tensors_of(model).at(name), tensor_of(row["weights_after"][name]), 1e-8, what + ": " + name);
  }
}

TEST(Golden, Layers) {
  for (const auto& row : rows_of("layers")) {
    if (row["kind"] == "Embedding") continue;  // below: its parameters are float
    for (const int replicas : {1, 3}) check_layer(row, replicas);
  }
}

TEST(Golden, LayersInputGradients) {
  for (const auto& row : rows_of("layers")) {
    if (!row.contains("input_gradient")) continue;
    const auto what = row["kind"].get<std::string>() + row["options"].dump();
    auto x = tensor_of(row["input"]).requires_grad_();
    const auto built = layer_of(row["kind"], row["options"]).spec().build(x.detach().slice(0, 0, 1));
    if (built.module != nullptr) {
      built.module->to(at::kDouble);
      built.module->train(row["training"]);
      const at::NoGradGuard no_grad;
      for (auto& item : built.module->named_parameters()) item.value().copy_(tensor_of(row["weights"][item.key()]));
      for (auto& item : built.module->named_buffers()) item.value().copy_(tensor_of(row["weights"][item.key()]));
    }
    const auto output = built.forward(x);
    expect_close(output, tensor_of(row["output"]), 1e-8, what + ": output");
    (output * tensor_of(row["cotangent"])).sum().backward();
    expect_close(x.grad(), tensor_of(row["input_gradient"]), 1e-8, what + ": input gradient");
  }
}

TEST(Golden, Embedding) {
  for (const auto& row : rows_of("layers")) {
    if (row["kind"] != "Embedding") continue;
    for (const int replicas : {1, 3}) {
      const MirroredStrategy strategy(replicas);
      const auto scope = strategy.scope();
      const auto x = tensor_of(row["input"]);
      Sequential model({layer_of("Embedding", row["options"])});
      model.build(x.sizes().slice(1).vec(), at::kLong);
      set_weights(model, row["weights"]);
      expect_close(model.predict(Dataset::from_tensor_slices(x).batch(2)), tensor_of(row["output"]), 1e-6,
                   "Embedding: output");
      model.compile({.optimizer = SGD({.learning_rate = 1}), .loss = inner_product()});
      model.train_on_batch({x, tensor_of(row["cotangent"]).to(at::kFloat)});
      expect_close(tensor_of(row["weights"]["weight"]) - tensors_of(model).at("weight"),
                   tensor_of(row["weight_gradients"]["weight"]), 1e-6, "Embedding: gradient");
    }
  }
}

// --- losses

Loss loss_of(const std::string& kind, const Json& o, const std::string& reduction_name) {
  const auto reduction = reduction_name == "sum"                   ? Reduction::sum
                         : reduction_name == "sum_over_batch_size" ? Reduction::sum_over_batch_size
                                                                   : Reduction::mean_with_sample_weight;
  const CrossentropyOptions crossentropy{o.value("from_logits", false), o.value("label_smoothing", 0.0), reduction};
  if (kind == "SparseCategoricalCrossentropy") return SparseCategoricalCrossentropy(crossentropy);
  if (kind == "CategoricalCrossentropy") return CategoricalCrossentropy(crossentropy);
  if (kind == "BinaryCrossentropy") return BinaryCrossentropy(crossentropy);
  if (kind == "MeanSquaredError") return MeanSquaredError({reduction});
  if (kind == "MeanAbsoluteError") return MeanAbsoluteError({reduction});
  if (kind == "Huber") return Huber({o.value("delta", 1.0), reduction});
  throw InvalidArgument("no loss " + kind);
}

// A model whose only parameter is added to its input, so that a step's change of it is the sum of the gradients of its
// outputs.
struct ShiftImpl : torch::nn::Module {
  explicit ShiftImpl(at::IntArrayRef sizes) { shift = register_parameter("shift", at::zeros(sizes, at::kDouble)); }
  Tensor forward(const Tensor& x) { return x + shift; }
  Tensor shift;
};

TEST(Golden, Losses) {
  for (const auto& row : rows_of("losses")) {
    const auto what = row["kind"].get<std::string>() + row["options"].dump() + row["reduction"].dump();
    const auto loss = loss_of(row["kind"], row["options"], row["reduction"]);
    const auto y_true = tensor_of(row["y_true"]);
    const auto weight = tensor_of(row["sample_weight"]);
    auto y_pred = tensor_of(row["y_pred"]).requires_grad_();
    const auto value = loss(y_true, y_pred, weight);
    const double expected = row["value"].get<double>();
    const double tolerance = 1e-9 * (1 + std::abs(expected));  // the table has 10 digits
    EXPECT_NEAR(value.item<double>(), expected, tolerance) << what;
    value.backward();
    expect_close(y_pred.grad(), tensor_of(row["gradient"]), 1e-8, what + ": gradient");

    for (const int replicas : {1, 3}) {  // 5 examples: ragged
      const MirroredStrategy strategy(replicas);
      const auto scope = strategy.scope();
      const auto sizes = y_pred.sizes().slice(1).vec();
      Model model([sizes] { return std::make_shared<ShiftImpl>(sizes); });
      model.compile({.optimizer = SGD({.learning_rate = 1}), .loss = loss});
      const auto logs = model.train_on_batch({y_pred.detach(), y_true, weight});
      EXPECT_NEAR(logs["loss"], expected, tolerance) << what << replicas;
      expect_close(-tensors_of(model).at("shift"), tensor_of(row["gradient"]).sum(0), 1e-8, what + ": summed gradient");
    }
  }
}

// --- metrics

Metric metric_of(const std::string& kind, const Json& o) {
  const auto precision = [&] {
    PrecisionOptions options;
    if (o.contains("thresholds")) options.threshold = o["thresholds"].get<double>();
    if (o.contains("top_k")) options.top_k = o["top_k"].get<int>();
    if (o.contains("class_id")) options.class_id = o["class_id"].get<int>();
    return options;
  };
  if (kind == "Accuracy") return Accuracy();
  if (kind == "BinaryAccuracy") return BinaryAccuracy({o.value("threshold", 0.5)});
  if (kind == "CategoricalAccuracy") return CategoricalAccuracy();
  if (kind == "SparseCategoricalAccuracy") return SparseCategoricalAccuracy();
  if (kind == "TopKCategoricalAccuracy") return TopKCategoricalAccuracy({o["k"]});
  if (kind == "SparseTopKCategoricalAccuracy") return SparseTopKCategoricalAccuracy({o["k"]});
  if (kind == "Precision") return Precision(precision());
  if (kind == "Recall") return Recall(precision());
  if (kind == "MeanSquaredError") return MeanSquaredErrorMetric();
  if (kind == "MeanAbsoluteError") return MeanAbsoluteErrorMetric();
  if (kind == "Mean") return Mean();
  throw InvalidArgument("no metric " + kind);
}

TEST(Golden, Metrics) {
  for (const auto& row : rows_of("metrics")) {
    const auto what = row["kind"].get<std::string>() + row["options"].dump();
    const auto metric = metric_of(row["kind"], row["options"]);
    for (const int replicas : {1, 3}) {
      std::vector<MetricState> states(static_cast<std::size_t>(replicas), MetricState(metric));
      for (const auto& batch : row["batches"]) {
        const auto y_true = tensor_of(batch["y_true"]);
        const auto y_pred = tensor_of(batch["y_pred"]);
        const auto weight = tensor_of(batch["sample_weight"]);
        for (int replica = 0; replica < replicas; ++replica) {
          const auto part = [&](const Tensor& all) {
            return all.defined() ? all.tensor_split(replicas)[static_cast<std::size_t>(replica)] : all;
          };
          states[static_cast<std::size_t>(replica)].update(part(y_true), part(y_pred), part(weight));
        }
      }
      for (int replica = 1; replica < replicas; ++replica) states[0].merge(states[static_cast<std::size_t>(replica)]);
      EXPECT_NEAR(states[0].result(), row["result"].get<double>(), 1e-6) << what << ", " << replicas << " replicas";
    }
  }
}

TEST(Golden, MetricsThroughEvaluate) {
  for (const auto& row : rows_of("metrics")) {
    if (row["kind"] == "Mean" || row["batches"][0]["y_pred"]["shape"].size() < 2) continue;
    const bool weighted = !row["batches"][0]["sample_weight"].is_null();
    const MirroredStrategy strategy(3);
    const auto scope = strategy.scope();
    std::vector<Tensor> x, y, w;
    for (const auto& batch : row["batches"]) {
      x.push_back(tensor_of(batch["y_pred"]));
      y.push_back(tensor_of(batch["y_true"]));
      if (weighted) w.push_back(tensor_of(batch["sample_weight"]));
    }
    Model model([] { return std::make_shared<ShiftImpl>(std::vector<std::int64_t>{1}); });
    const auto metric = metric_of(row["kind"], row["options"]);
    CompileOptions options{
        .loss = Loss("none", [](const Tensor&, const Tensor& y_pred) { return y_pred.flatten(1).sum(1); })};
    (weighted ? options.weighted_metrics : options.metrics) = {metric};
    model.compile(options);
    const auto data = Dataset::from_tensor_slices(at::cat(x), at::cat(y), weighted ? at::cat(w) : Tensor()).batch(4);
    EXPECT_NEAR(model.evaluate(data)[metric.name()], row["result"].get<double>(), 1e-6)
        << row["kind"] << row["options"];
  }
}

// --- optimizers and schedules

template <class Options>
Options with_common(const Json& o, Options options) {
  if (o.contains("learning_rate")) options.learning_rate = o["learning_rate"].get<double>();
  const auto set = [&](const char* name, std::optional<double>& field) {
    if (o.contains(name)) field = o[name].get<double>();
  };
  set("weight_decay", options.weight_decay);
  set("clipnorm", options.clipnorm);
  set("clipvalue", options.clipvalue);
  set("global_clipnorm", options.global_clipnorm);
  return options;
}

Optimizer optimizer_of(const std::string& kind, const Json& o) {
  const auto adam = [&] {
    return with_common(o, AdamOptions{.beta_1 = o.value("beta_1", 0.9),
                                      .beta_2 = o.value("beta_2", 0.999),
                                      .epsilon = o.value("epsilon", 1e-7),
                                      .amsgrad = o.value("amsgrad", false)});
  };
  if (kind == "SGD")
    return SGD(
        with_common(o, SGDOptions{.momentum = o.value("momentum", 0.0), .nesterov = o.value("nesterov", false)}));
  if (kind == "Adam") return Adam(adam());
  if (kind == "AdamW") return AdamW(adam());
  if (kind == "RMSprop") {
    return RMSprop(with_common(o, RMSpropOptions{.rho = o.value("rho", 0.9),
                                                 .momentum = o.value("momentum", 0.0),
                                                 .epsilon = o.value("epsilon", 1e-7),
                                                 .centered = o.value("centered", false)}));
  }
  if (kind == "Adagrad") {
    return Adagrad(with_common(o, AdagradOptions{.initial_accumulator_value = o.value("initial_accumulator_value", 0.1),
                                                 .epsilon = o.value("epsilon", 1e-7)}));
  }
  throw InvalidArgument("no optimizer " + kind);
}

// Keras rounds beta_2 to float32 on the way to float64, which moves Adam's steps by a hundred-thousandth.
constexpr double kOptimizerTolerance = 5e-6;

TEST(Golden, OptimizersAfterTenSteps) {
  for (const auto& row : rows_of("optimizers")) {
    for (const int replicas : {1, 3}) {
      const MirroredStrategy strategy(replicas);
      const auto scope = strategy.scope();
      Sequential model({Dense(3)});
      model.build({4}, at::kDouble);
      set_weights(model, {{"weight", row["weight"]}, {"bias", row["bias"]}});
      model.compile({.optimizer = optimizer_of(row["kind"], row["options"]), .loss = "mse"});
      for (int step = 0; step < 10; ++step) model.train_on_batch({tensor_of(row["x"]), tensor_of(row["y"])});
      const auto what = row["kind"].get<std::string>() + row["options"].dump();
      expect_close(tensors_of(model).at("weight"), tensor_of(row["weight_after"]), kOptimizerTolerance, what);
      expect_close(tensors_of(model).at("bias"), tensor_of(row["bias_after"]), kOptimizerTolerance, what);
    }
  }
}

LearningRate schedule_of(const std::string& kind, const Json& o) {
  if (kind == "ExponentialDecay") {
    return ExponentialDecay(o["initial_learning_rate"],
                            {o["decay_steps"], o["decay_rate"], o.value("staircase", false)});
  }
  if (kind == "PiecewiseConstantDecay") return PiecewiseConstantDecay(o["boundaries"], o["values"]);
  if (kind == "CosineDecay") {
    return CosineDecay(o["initial_learning_rate"], o["decay_steps"],
                       {o.value("alpha", 0.0), o.value("warmup_target", 0.0), o.value("warmup_steps", 0)});
  }
  if (kind == "WarmUp") return WarmUp(o["learning_rate"].get<double>(), o["steps"]);
  throw InvalidArgument("no schedule " + kind);
}

TEST(Golden, Schedules) {
  for (const auto& row : rows_of("schedules")) {
    const auto schedule = schedule_of(row["kind"], row["options"]);
    for (std::size_t i = 0; i < row["steps"].size(); ++i) {
      EXPECT_NEAR(schedule.at(row["steps"][i]), row["values"][i].get<double>(), 1e-7)
          << row["kind"] << row["options"] << row["steps"][i];
    }
  }
}

}  // namespace
}  // namespace lockstep
