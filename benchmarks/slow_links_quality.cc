// Trains by the workers that the environment tells. Prints the loss of a small GPT on text that it has not seen, or the
// accuracy of the seed program. benchmarks/slow_links_quality.py compares ways to meet.
#include <lockstep/lockstep.h>

#include <fstream>
#include <iostream>

#include "../examples/arguments.h"
#include "gpt_layers.h"
#include "models.h"

namespace ls = lockstep;
using at::Tensor;

namespace {

struct Options {
  std::string task = "gpt";
  int steps = 1000, seed = 1, batch = 16;  // batch: of a worker
  std::string gradient_dtype;
  std::int64_t meet_after = 0;
  double outer_rate = 0.7, outer_momentum = 0.9;
  std::string meet_dtype;
  std::string from, to;  // files with weights of the GPT
  std::vector<std::string> files;
};

std::optional<ls::DType> dtype_named(const std::string& name) {
  if (name.empty()) return {};
  return name == "int8" ? ls::DType::int8 : ls::DType::bfloat16;
}

ls::MultiWorkerMirroredStrategy make_strategy(const Options& options) {
  ls::MultiWorkerMirroredOptions with{.devices = {"cpu:0"}, .threads_per_replica = 1};
  with.communication.gradient_dtype = dtype_named(options.gradient_dtype);
  if (options.meet_after > 0) {
    with.diloco = ls::DiLoCoOptions{
        .steps = options.meet_after, .learning_rate = options.outer_rate, .momentum = options.outer_momentum};
    with.diloco->dtype = dtype_named(options.meet_dtype);
  }
  return ls::MultiWorkerMirroredStrategy(with);
}

constexpr benchmarks::GptSizes kSizes{.layers = 2, .width = 128, .sequence = 64};

struct Gpt : torch::nn::Module {
  Gpt() {
    front = register_module("front", std::make_shared<benchmarks::FrontImpl>(kSizes));
    for (int i = 0; i < kSizes.layers; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<benchmarks::BlockImpl>(kSizes)));
    back = register_module("back", std::make_shared<benchmarks::BackImpl>(kSizes));
  }
  Tensor forward(const Tensor& bytes) {
    auto x = front->forward(bytes);
    for (const auto& block : blocks) x = block->forward(x);
    return back->forward(x);
  }
  std::shared_ptr<benchmarks::FrontImpl> front;
  std::vector<std::shared_ptr<benchmarks::BlockImpl>> blocks;
  std::shared_ptr<benchmarks::BackImpl> back;
};

Tensor read(const std::vector<std::string>& files) {
  std::string all;
  for (const auto& file : files) {
    std::ifstream in(file, std::ios::binary);
    all.append(std::istreambuf_iterator<char>(in), {});
  }
  return at::from_blob(all.data(), {static_cast<std::int64_t>(all.size())}, at::kByte).to(at::kLong);
}

ls::Example stretches(const Tensor& text, std::int64_t count, std::uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  const auto begins = at::randint(text.size(0) - kSizes.sequence, {count, 1}, generator);
  const auto bytes = text.take(begins + at::arange(kSizes.sequence + 1));
  return {bytes.slice(1, 0, -1), bytes.slice(1, 1)};
}

// The loss on the last tenth of the text.
double train_gpt(const Options& options, const ls::MultiWorkerMirroredStrategy& strategy) {
  const auto text = read(options.files);
  const auto known = text.slice(0, 0, text.size(0) * 9 / 10), unknown = text.slice(0, text.size(0) * 9 / 10);
  const auto scope = strategy.scope();
  ls::Model model([] { return std::make_shared<Gpt>(); });
  model.compile({.optimizer = ls::AdamW({.learning_rate = ls::CosineDecay(2e-3, options.steps), .weight_decay = 0.01}),
                 .loss = ls::SparseCategoricalCrossentropy({.from_logits = true})});
  model.build({kSizes.sequence}, at::kLong);
  if (!options.from.empty()) model.load_weights(options.from);
  const auto batch = static_cast<std::int64_t>(options.batch) * strategy.num_workers();
  const auto data = ls::Dataset::from_generator([&]() -> ls::Dataset::Generator {
    return [&, step = std::uint64_t{0}]() mutable -> std::optional<ls::Example> {
      return stretches(known, batch, (options.seed * 1'000'000) + ++step);
    };
  });
  model.fit(data, {.verbose = 0, .steps_per_epoch = options.steps});
  if (!options.to.empty()) model.save_weights(options.to);
  const auto held_out = stretches(unknown, 512, 1);
  return model.evaluate(ls::Dataset::from_tensor_slices(held_out.x, held_out.y).batch(64))["loss"];
}

double train_seed_program(const Options& options, const ls::MultiWorkerMirroredStrategy& strategy) {
  const auto scale = [](ls::Example example) {
    example.x = example.x.to(at::kFloat).div(255);
    return example;
  };
  const auto batch = static_cast<std::int64_t>(options.batch) * strategy.num_workers();
  auto [train, test] = ls::datasets::fashion_mnist();
  const auto scope = strategy.scope();
  auto model = benchmarks::make_work("seed_cnn", "sequential", 1).model;
  model.compile({.optimizer = ls::Adam(),
                 .loss = ls::SparseCategoricalCrossentropy({.from_logits = true}),
                 .metrics = {"accuracy"}});
  const auto epochs = options.steps;
  model.fit(train.map(scale).cache().shuffle(10'000).batch(batch), {.epochs = epochs, .verbose = 0});
  return model.evaluate(test.map(scale).batch(500))["accuracy"];
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  Arguments arguments("Says what a training over slow links is worth");
  arguments.option("--task", options.task, "what to train").one_of({"gpt", "seed"});
  arguments.option("--steps", options.steps, "steps of the GPT; epochs of the seed program").from(1);
  arguments.option("--batch", options.batch, "examples a worker").from(1);
  arguments.option("--seed", options.seed, "of first values and order");
  arguments.option("--gradient-dtype", options.gradient_dtype, "of gradients in each step")
      .one_of({"bfloat16", "int8"});
  arguments.option("--meet-after", options.meet_after, "steps between meetings; 0: gradients are summed in each")
      .from(0);
  arguments.option("--outer-rate", options.outer_rate, "of DiLoCo's outer step; 1 for LocalSGD");
  arguments.option("--outer-momentum", options.outer_momentum, "of DiLoCo's outer step; 0 for LocalSGD");
  arguments.option("--meet-dtype", options.meet_dtype, "what is sent at meetings").one_of({"bfloat16", "int8"});
  arguments.option("--from", options.from, "weights with which the GPT begins");
  arguments.option("--to", options.to, "where its weights are saved");
  arguments.words("files", options.files, "texts whose bytes the GPT learns");
  arguments.parse(argc, argv);
  try {
    ls::set_random_seed(options.seed);
    const auto strategy = make_strategy(options);
    const double value = options.task == "gpt" ? train_gpt(options, strategy) : train_seed_program(options, strategy);
    if (strategy.is_chief()) std::cout << R"({"value": )" << value << "}\n";
  } catch (const std::exception& error) {
    std::cerr << "slow_links_quality: " << error.what() << "\n";
    return 1;
  }
}
