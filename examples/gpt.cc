// A small GPT, trained on the bytes of text files, on any mesh of processes:
//   build/release/examples/gpt docs/*.md
//   build/release/lockstep run -n 2 build/release/examples/gpt --tensor 2 docs/*.md
//   build/release/lockstep run -n 8 build/release/examples/gpt --shard 2 --pipeline 2 --tensor 2 docs/*.md
//   build/release/lockstep run -n 2 build/release/examples/gpt --plan docs/*.md
//   build/release/lockstep run -n 4 --min-n 2 --restarts 4 build/release/examples/gpt --tensor 2 --elastic docs/*.md
// The loss is the same on every mesh. With --plan it measures which one is the fastest that fits. With --elastic it
// goes on without ranks that are lost, and with new ones. docs/parallelism.md has more on both.
#include <lockstep/lockstep.h>
#include <lockstep/parallel.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/utils.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <limits>

#include "arguments.h"

namespace ls = lockstep;

namespace {

struct Options {
  std::int64_t layers = 4, width = 128, head = 32, sequence = 64, batch = 16;
  int steps = 100, shard = 1, pipeline = 1, tensor = 1, microbatches = 4;
  bool plan = false, elastic = false;
  int plan_ranks = 0;
  double memory_mib = std::numeric_limits<double>::infinity();
  std::vector<std::string> files;
};

// --- the model, which knows nothing of meshes; its layers are [batch, sequence] or [batch, sequence, width] to the
// same

struct EmbedImpl : torch::nn::Module {
  explicit EmbedImpl(const Options& options)
      : token(register_module("token", torch::nn::Embedding(256, options.width))),
        place(register_module("place", torch::nn::Embedding(options.sequence, options.width))) {}
  at::Tensor forward(const at::Tensor& bytes) { return token(bytes) + place(at::arange(bytes.size(1))); }

  torch::nn::Embedding token, place;
};

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const Options& options) : head(options.head) {
    const auto width = options.width;
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));  // ordered by head
    out = register_module("out", torch::nn::Linear(width, width));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }
  at::Tensor forward(at::Tensor x) {
    const auto qkv_by_head = qkv(norm1(x)).unflatten(-1, {-1, 3, head}).permute({3, 0, 2, 1, 4});
    const auto y = at::scaled_dot_product_attention(qkv_by_head[0], qkv_by_head[1], qkv_by_head[2], {}, 0, true);
    x = x + out(y.transpose(1, 2).flatten(2));
    return x + down(torch::gelu(up(norm2(x))));
  }

  const std::int64_t head;
  torch::nn::LayerNorm norm1 = nullptr, norm2 = nullptr;
  torch::nn::Linear qkv = nullptr, out = nullptr, up = nullptr, down = nullptr;
};

struct HeadImpl : torch::nn::Module {
  explicit HeadImpl(const Options& options)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})))),
        logits(register_module("logits", torch::nn::Linear(options.width, 256))) {}
  at::Tensor forward(const at::Tensor& x) { return logits(norm(x)); }

  torch::nn::LayerNorm norm;
  torch::nn::Linear logits;
};

std::vector<ls::PipelineStage> layers_of(const Options& options) {
  std::vector<ls::PipelineStage> layers{[=] { return std::make_shared<EmbedImpl>(options); }};
  for (std::int64_t i = 0; i < options.layers; ++i)
    layers.emplace_back([=] { return std::make_shared<BlockImpl>(options); });
  layers.emplace_back([=] { return std::make_shared<HeadImpl>(options); });
  return layers;
}

// --- how layers are divided over the axis "tensor"; they are called "0", "1", ...

const ls::ParallelPlan kPlan{
    {"*.token", ls::RowwiseParallel()}, {"*.qkv", ls::ColwiseParallel()},
    {"*.out", ls::RowwiseParallel()},   {"*.up", ls::ColwiseParallel()},
    {"*.down", ls::RowwiseParallel()},  {"*.logits", ls::ColwiseParallel{.output = ls::Replicate()}}};

// --- the data

// Bytes [count], one after the other.
at::Tensor read(const Options& options) {
  std::string all;
  for (const auto& file : options.files) {
    std::ifstream in(file, std::ios::binary);
    if (!in) throw ls::IoError("cannot read " + file);
    all.append(std::istreambuf_iterator<char>(in), {});
  }
  if (all.size() <= static_cast<std::size_t>(options.sequence))
    throw ls::InvalidArgument("the files have too few bytes");
  return at::from_blob(all.data(), {static_cast<std::int64_t>(all.size())}, at::kByte).to(at::kLong);
}

// Some stretches of the text, the same on all ranks, and what follows each byte: [batch, sequence].
ls::Example batch_of(const at::Tensor& text, int step, const Options& options) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(step);
  const auto begins = at::randint(text.size(0) - options.sequence, {options.batch, 1}, generator);
  const auto bytes = text.take(begins + at::arange(options.sequence + 1));
  return {bytes.slice(1, 0, -1), bytes.slice(1, 1)};
}

ls::Dataset batches_of(const at::Tensor& text, const Options& options) {
  return ls::Dataset::from_generator([=]() -> ls::Dataset::Generator {
    return [=, step = 0]() mutable -> std::optional<ls::Example> { return batch_of(text, ++step, options); };
  });
}

// --- the training

// Prints on the chief the mean loss since the line before.
class Progress : public ls::Callback {
 public:
  explicit Progress(const Options& options) : options_(options) {}
  bool only_on_chief() const override { return true; }

  void on_train_batch_end(std::int64_t, const ls::Logs& logs) override {
    const double sum = logs["loss"] * static_cast<double>(++step_);  // logs have the mean of all steps
    if (step_ % 10 != 0 && step_ != 1) return;
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start_;
    std::cout << "step " << step_ << ": loss " << (sum - sum_) / static_cast<double>(step_ - said_) << ", "
              << static_cast<std::int64_t>(static_cast<double>(step_ * options_.batch * options_.sequence) /
                                           seconds.count())
              << " bytes/s\n"
              << std::flush;
    sum_ = sum;
    said_ = step_;
  }

 private:
  const Options options_;
  std::int64_t step_ = 0, said_ = 0;
  double sum_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

void train(const Options& options, const at::Tensor& text, const ls::DeviceMesh& mesh,
           const ls::ModelParallelOptions& with) {
  ls::set_random_seed(1);
  const ls::ModelParallelStrategy strategy(mesh, with);
  const auto scope = strategy.scope();
  ls::Model model(layers_of(options));
  model.compile({.optimizer = ls::AdamW({.learning_rate = 1e-3, .weight_decay = 1e-2}),
                 .loss = ls::SparseCategoricalCrossentropy({.from_logits = true})});
  if (options.steps == 0) return;
  model.fit(batches_of(text, options),
            {.verbose = 0, .callbacks = {Progress(options)}, .steps_per_epoch = options.steps});
}

// Gives each stage equally many layers, or one more.
std::vector<int> even_stages(int layers, int stages) {
  std::vector<int> counts;
  for (int stage = 0; stage < stages; ++stage) counts.push_back((layers + stage) / stages);
  return counts;
}

// Trains on the mesh that the options say.
void train_on_mesh(const Options& options) {
  const ls::DeviceMesh mesh(
      {{"data", -1}, {"shard", options.shard}, {"pipeline", options.pipeline}, {"tensor", options.tensor}},
      {.elastic = options.elastic});
  if (options.width % (options.head * options.tensor) != 0)
    throw ls::InvalidArgument("--width must be a multiple of --head times --tensor: each rank has whole heads");
  ls::ModelParallelOptions with{.plan = kPlan, .fully_shard = {.units = {"*"}}, .microbatches = options.microbatches};
  if (options.elastic) {
    with.elastic = ls::ElasticOptions();
    with.layers_of_stages =
        even_stages(static_cast<int>(options.layers) + 2, options.pipeline);  // not by measured times
  }
  train(options, read(options), mesh, with);
}

// Trains on the fastest mesh that fits.
void train_by_plan(const Options& options) {
  const ls::DeviceMesh job({{"ranks", -1}});
  const auto text = read(options);
  const auto sample = batch_of(text, 0, options);
  const auto loss = [](const at::Tensor& logits, const at::Tensor& next, const ls::Communicator&) {
    return at::cross_entropy_loss(logits.flatten(0, 1), next.flatten());
  };
  const auto plan =
      ls::plan_parallel(layers_of(options), sample.x, sample.y, loss, job.ranks(),
                        {.ranks = options.plan_ranks, .memory_bytes = options.memory_mib * (1 << 20), .tensor = kPlan});
  if (job.ranks().rank() == 0) std::cout << plan.table() << std::flush;
  if (options.plan_ranks > job.ranks().size()) return;  // a plan for a larger job
  const auto& split = plan.best().split;
  train(options, text, ls::DeviceMesh(split.axes(), job.ranks()), ls::options_of(split, kPlan));
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments("A GPT on any mesh of processes");
  Options options;
  arguments.option("--layers", options.layers);
  arguments.option("--width", options.width);
  arguments.option("--head", options.head, "features of a head");
  arguments.option("--sequence", options.sequence);
  arguments.option("--batch", options.batch, "stretches of text in a step, on all ranks together");
  arguments.option("--steps", options.steps);
  arguments.option("--shard", options.shard, "ranks that share parameters, gradients and optimizer state");
  arguments.option("--pipeline", options.pipeline, "stages");
  arguments.option("--tensor", options.tensor, "ranks that share each layer");
  arguments.option("--microbatches", options.microbatches);
  arguments.flag("--elastic", options.elastic, "goes on without ranks that are lost, and with new ones");
  arguments.flag("--plan", options.plan,
                 "measures which split is the fastest that fits, prints that, and trains by it");
  arguments.option("--plan-ranks", options.plan_ranks, "plans for so many ranks; trains where as many are there");
  arguments.option("--memory-mib", options.memory_mib, "that a rank may use, for --plan");
  arguments.words("files", options.files, "texts whose bytes are learnt").required();
  arguments.parse(argc, argv);
  try {
    options.plan ? train_by_plan(options) : train_on_mesh(options);
  } catch (const std::bad_alloc&) {
    std::cerr << "not enough memory: split the model over more ranks (--shard, --pipeline, --tensor)\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
