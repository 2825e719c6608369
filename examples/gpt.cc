// A small GPT, trained on the bytes of text files, on any mesh of processes:
//   build/release/examples/gpt docs/*.md
//   build/release/lockstep run -n 2 build/release/examples/gpt --tensor 2 docs/*.md
//   build/release/lockstep run -n 8 build/release/examples/gpt --shard 2 --pipeline 2 --tensor 2 docs/*.md
// The loss is the same on every mesh. docs/parallelism.md says which one to take.
#include <lockstep/parallel.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <fstream>
#include <iostream>

namespace ls = lockstep;

namespace {

struct Options {
  std::int64_t layers = 4, width = 128, head = 32, sequence = 64, batch = 16;
  int steps = 100, shard = 1, pipeline = 1, tensor = 1, microbatches = 4;
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

// One of `stages` equal stretches of the layers.
struct StageImpl : torch::nn::Module {
  StageImpl(const Options& options, int stage, int stages) {
    if (stage == 0) embed = register_module("embed", std::make_shared<EmbedImpl>(options));
    blocks = register_module("blocks", torch::nn::ModuleList());
    const auto first = stage * options.layers / stages, last = (stage + 1) * options.layers / stages;
    for (auto i = first; i < last; ++i) blocks->push_back(std::make_shared<BlockImpl>(options));
    if (stage == stages - 1) head = register_module("head", std::make_shared<HeadImpl>(options));
  }
  at::Tensor forward(at::Tensor x) {
    if (embed) x = embed->forward(x);
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    return head ? head->forward(x) : x;
  }

  std::shared_ptr<EmbedImpl> embed;
  torch::nn::ModuleList blocks = nullptr;
  std::shared_ptr<HeadImpl> head;
};
TORCH_MODULE(Stage);

// --- how it is split

ls::ParallelPlan plan_of(const StageImpl& stage) {
  ls::ParallelPlan plan{{"blocks.*.qkv", ls::ColwiseParallel()},
                        {"blocks.*.out", ls::RowwiseParallel()},
                        {"blocks.*.up", ls::ColwiseParallel()},
                        {"blocks.*.down", ls::RowwiseParallel()}};
  if (stage.embed) plan.emplace_back("embed.token", ls::RowwiseParallel());
  if (stage.head) plan.emplace_back("head.logits", ls::ColwiseParallel());
  return plan;
}

// Bytes [count], one after the other.
at::Tensor read(const std::vector<std::string>& files) {
  std::string all;
  for (const auto& file : files) {
    std::ifstream in(file, std::ios::binary);
    if (!in) throw ls::IoError("cannot read " + file);
    all.append(std::istreambuf_iterator<char>(in), {});
  }
  return at::from_blob(all.data(), {static_cast<std::int64_t>(all.size())}, at::kByte).to(at::kLong);
}

// Some stretches of the text, the same on all ranks: [batch, sequence + 1].
at::Tensor batch_of(const at::Tensor& text, int step, const Options& options) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(step);
  const auto begins = at::randint(text.size(0) - options.sequence, {options.batch, 1}, generator);
  return text.take(begins + at::arange(options.sequence + 1));
}

void train(const Options& options) {
  const ls::DeviceMesh mesh(
      {{"data", -1}, {"shard", options.shard}, {"pipeline", options.pipeline}, {"tensor", options.tensor}});
  if (options.width % (options.head * options.tensor) != 0)
    throw ls::InvalidArgument("--width must be a multiple of --head times --tensor: each rank has whole heads");
  const auto text = read(options.files);
  if (text.size(0) <= options.sequence) throw ls::InvalidArgument("the files have too few bytes");

  std::vector<ls::PipelineStage> stages;
  for (int i = 0; i < options.pipeline; ++i) {
    stages.emplace_back([&, i] {
      Stage stage(options, i, options.pipeline);
      ls::parallelize_module(stage, mesh["tensor"], plan_of(*stage));
      return stage;
    });
  }
  torch::manual_seed(1);
  ls::Pipeline pipeline(stages, mesh["pipeline"], {.microbatches = options.microbatches});
  ls::FullyShardedParameters sharded(mesh["shard"]);
  auto& stage = *pipeline.modules().front().second;
  for (const auto& block : stage.as<StageImpl>()->blocks->named_children()) {
    sharded.add(*block.value(), "blocks." + block.key());
  }
  sharded.add(stage, "", /*keep=*/true);
  torch::optim::AdamW adamw(sharded.parameters(), torch::optim::AdamWOptions(1e-3));

  const auto copies = mesh.size("data") * mesh.size("shard");
  const auto copy = static_cast<std::size_t>(mesh.coordinate("data") * mesh.size("shard") + mesh.coordinate("shard"));
  const auto start = std::chrono::steady_clock::now();
  for (int step = 1; step <= options.steps; ++step) {
    const auto bytes = batch_of(text, step, options).chunk(copies)[copy];
    adamw.zero_grad();
    double loss =
        pipeline.step(bytes.slice(1, 0, -1), bytes.slice(1, 1), [&](const at::Tensor& logits, const at::Tensor& next) {
          return ls::vocabulary_parallel_cross_entropy(logits, next, mesh["tensor"]).mean();
        });
    ls::average_gradients(sharded.parameters(), mesh["data"]);
    adamw.step();

    mesh["shard"].sum({&loss, 1});
    mesh["data"].sum({&loss, 1});
    if (mesh.ranks().rank() == 0 && (step % 10 == 0 || step == 1)) {
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      std::cout << "step " << step << ": loss " << loss / copies << ", "
                << static_cast<std::int64_t>(step * options.batch * options.sequence / seconds.count()) << " bytes/s\n"
                << std::flush;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("A GPT on any mesh of processes");
  Options options;
  app.add_option("--layers", options.layers);
  app.add_option("--width", options.width);
  app.add_option("--head", options.head, "features of a head");
  app.add_option("--sequence", options.sequence);
  app.add_option("--batch", options.batch, "stretches of text in a step, on all ranks together");
  app.add_option("--steps", options.steps);
  app.add_option("--shard", options.shard, "ranks that share parameters, gradients and optimizer state");
  app.add_option("--pipeline", options.pipeline, "stages");
  app.add_option("--tensor", options.tensor, "ranks that share each layer");
  app.add_option("--microbatches", options.microbatches);
  app.add_option("files", options.files)->required();
  CLI11_PARSE(app, argc, argv);
  try {
    train(options);
  } catch (const std::bad_alloc&) {
    std::cerr << "not enough memory: split the model over more ranks (--shard, --pipeline, --tensor)\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
