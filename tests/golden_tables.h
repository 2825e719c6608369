// Reads the tables that Keras made (tools/golden/make.py).
#pragma once

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <ATen/ATen.h>

#include <fstream>
#include <nlohmann/json.hpp>

namespace lockstep {

using Json = nlohmann::json;

inline Json rows_of(const std::string& table) {
  std::ifstream file(std::string(LOCKSTEP_SOURCE_DIR) + "/tests/golden/" + table + ".json");
  EXPECT_TRUE(file.good()) << table;
  return Json::parse(file);
}

inline Tensor tensor_of(const Json& packed) {
  if (packed.is_null()) return {};
  const auto shape = packed["shape"].get<std::vector<std::int64_t>>();
  if (packed["integer"]) return at::tensor(packed["data"].get<std::vector<std::int64_t>>()).view(shape);
  return at::tensor(packed["data"].get<std::vector<double>>(), at::kDouble).view(shape);
}

inline void expect_close(const Tensor& actual, const Tensor& expected, double tolerance, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  const double difference = (actual.to(at::kDouble) - expected).abs().max().item<double>();
  EXPECT_LE(difference, tolerance * (1 + expected.abs().max().item<double>())) << what;
}

inline Size2D size_of(const Json& options, const char* name, Size2D otherwise) {
  return options.contains(name) ? Size2D(options[name][0], options[name][1]) : otherwise;
}

inline Layer layer_of(const std::string& kind, const Json& o) {
  const auto activation = o.value("activation", "linear");
  const auto padding = o.value("padding", "valid");
  if (kind == "Conv2D") {
    return Conv2D(o["filters"], size_of(o, "kernel_size", 0),
                  {.strides = size_of(o, "strides", 1),
                   .padding = padding,
                   .dilation_rate = size_of(o, "dilation_rate", 1),
                   .groups = o.value("groups", 1),
                   .activation = activation.c_str(),
                   .use_bias = o.value("use_bias", true)});
  }
  if (kind == "MaxPooling2D")
    return MaxPooling2D(size_of(o, "pool_size", 2), {.strides = size_of(o, "strides", 0), .padding = padding});
  if (kind == "AveragePooling2D")
    return AveragePooling2D(size_of(o, "pool_size", 2), {.strides = size_of(o, "strides", 0), .padding = padding});
  if (kind == "GlobalAveragePooling2D") return GlobalAveragePooling2D();
  if (kind == "Flatten") return Flatten();
  if (kind == "Dense")
    return Dense(o["units"], {.activation = activation.c_str(), .use_bias = o.value("use_bias", true)});
  if (kind == "Activation") return Activation(activation.c_str());
  if (kind == "Dropout") return Dropout(o["rate"]);
  if (kind == "BatchNormalization") {
    return BatchNormalization({.momentum = o.value("momentum", 0.99),
                               .epsilon = o.value("epsilon", 1e-3),
                               .center = o.value("center", true),
                               .scale = o.value("scale", true)});
  }
  if (kind == "LayerNormalization") {
    return LayerNormalization(
        {.epsilon = o.value("epsilon", 1e-3), .center = o.value("center", true), .scale = o.value("scale", true)});
  }
  if (kind == "Embedding") return Embedding(o["input_dim"], o["output_dim"]);
  throw InvalidArgument("no layer " + kind);
}

// The sum of outputs times the table's cotangent: its gradients are the table's.
inline Loss inner_product() {
  return {"inner_product",
          [](const Tensor& y_true, const Tensor& y_pred) { return (y_true * y_pred).flatten(1).sum(1); },
          Reduction::sum};
}

}  // namespace lockstep
