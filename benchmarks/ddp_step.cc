// Measures a step of DistributedDataParallel; one process a rank:
//   ddp_step --model seed_cnn --rank 0 --size 2 --store 127.0.0.1:29511 &
//   ddp_step --model seed_cnn --rank 1 --size 2 --store 127.0.0.1:29511
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <lockstep/collective/make_group.h>
#include <lockstep/ddp.h>
#include <torch/optim/adam.h>

#include <chrono>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>

#include "../examples/arguments.h"
#include "models.h"

using namespace lockstep;

namespace {

struct Options {
  std::string model = "seed_cnn";
  World world;
  std::string store;
  GroupOptions group;
  DistributedDataParallelOptions ddp;
  std::string gradient_dtype;
  int steps = 200;
  int batch = 64;
  bool at_the_end = false;  // all gradients in one bucket, after backward
};

Deadline soon() { return Deadline::after(std::chrono::seconds(120)); }

// The best of three runs, after a warm-up; in milliseconds a step.
template <class Net>
double measure(const std::shared_ptr<Net>& net, const at::Tensor& x, const Group& group, const Options& options) {
  DistributedDataParallel ddp(net, group, options.ddp);
  torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(1e-3));
  const auto y = at::randint(10, {x.size(0)}, at::kLong);
  const auto run = [&](int steps) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < steps; ++i) {
      adam.zero_grad();
      at::cross_entropy_loss(ddp(x), y).backward();
      adam.step();
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / steps;
  };
  run(std::max(2, options.steps / 5));
  double best = run(options.steps);
  for (int i = 0; i < 2; ++i) best = std::min(best, run(options.steps));
  group.barrier(soon());
  return best;
}

double measure(const Group& group, const Options& options) {
  if (options.model == "transformer") {
    const auto x =
        at::randint(benchmarks::Transformer::kVocabulary, {options.batch, benchmarks::Transformer::kTokens}, at::kLong);
    return measure(std::make_shared<benchmarks::Transformer>(), x, group, options);
  }
  return measure(std::make_shared<benchmarks::OwnSeedCnn>(), at::rand({options.batch, 1, 28, 28}), group, options);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  Arguments arguments("Time of a DistributedDataParallel step");
  arguments.option("--model", options.model).one_of({"seed_cnn", "transformer"});
  arguments.option("--rank", options.world.rank).required();
  arguments.option("--size", options.world.size).required();
  arguments.option("--store", options.store, "host:port; rank 0 holds it").required();
  arguments.option("--host", options.world.host);
  arguments.option("--address", options.world.address);
  arguments.option("--backend", options.group.backend);
  arguments.option("--gradient-dtype", options.gradient_dtype).one_of({"bfloat16", "float16"});
  arguments.flag("--at-the-end", options.at_the_end, "reduce all gradients after backward, in one bucket");
  arguments.option("--bucket-cap-mb", options.ddp.bucket_cap_mb);
  arguments.option("--batch", options.batch);
  arguments.option("--steps", options.steps);
  arguments.parse(argc, argv);
  if (options.at_the_end) options.ddp.bucket_cap_mb = options.ddp.first_bucket_mb = 1e6;
  if (!options.gradient_dtype.empty()) {
    options.ddp.gradient_dtype = options.gradient_dtype == "bfloat16" ? DType::bfloat16 : DType::float16;
  }
  try {
    at::set_num_threads(1);
    const auto store = options.world.rank == 0 ? Store::hold(options.store) : Store::connect(options.store, soon());
    const auto group = make_group(options.world, store, options.group);
    const double seconds = measure(group, options);
    if (options.world.rank == 0) {
      std::cout << nlohmann::json{{"model", options.model},
                                  {"backend", group.backend()},
                                  {"ranks", group.size()},
                                  {"ms_per_step", seconds * 1e3},
                                  {"samples_per_s", options.batch * group.size() / seconds}}
                << std::endl;
    }
  } catch (const std::exception& error) {
    std::cerr << "ddp_step: " << error.what() << "\n";
    return 1;
  }
}
