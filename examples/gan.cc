// Two networks against each other, each with its own optimizer (Goodfellow et al. 2014; Radford et al. 2015). A
// generator learns to draw clothes, and a discriminator learns to tell them from those of Fashion-MNIST. Writes what
// the generator draws to gan.pgm.
//   gan [epochs]
#include <lockstep/lockstep.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <fstream>
#include <iostream>

namespace ls = lockstep;

namespace {

constexpr int kNoise = 64;
constexpr std::int64_t kImages = 12'800;

// Noise [batch, 64] to images [batch, 1, 28, 28] in [-1, 1].
struct GeneratorImpl : torch::nn::Module {
  GeneratorImpl() {
    const auto twice = [](int from, int to) {
      return torch::nn::ConvTranspose2d(torch::nn::ConvTranspose2dOptions(from, to, 4).stride(2).padding(1));
    };
    seed = register_module("seed", torch::nn::Linear(kNoise, 32 * 7 * 7));
    norm = register_module("norm", torch::nn::BatchNorm2d(32));
    middle = register_module("middle", twice(32, 16));
    image = register_module("image", twice(16, 1));
  }
  torch::Tensor forward(const torch::Tensor& noise) {
    const auto small = torch::relu(norm(seed(noise).view({-1, 32, 7, 7})));
    return torch::tanh(image(torch::relu(middle(small))));
  }
  torch::nn::Linear seed = nullptr;
  torch::nn::BatchNorm2d norm = nullptr;
  torch::nn::ConvTranspose2d middle = nullptr, image = nullptr;
};
TORCH_MODULE(Generator);

// Images to logits [batch]: positive for those that look real.
struct DiscriminatorImpl : torch::nn::Module {
  DiscriminatorImpl() {
    const auto half = [](int from, int to) {
      return torch::nn::Conv2d(torch::nn::Conv2dOptions(from, to, 4).stride(2).padding(1));
    };
    first = register_module("first", half(1, 16));
    second = register_module("second", half(16, 32));
    output = register_module("output", torch::nn::Linear(32 * 7 * 7, 1));
  }
  torch::Tensor forward(const torch::Tensor& images) {
    const auto features = torch::leaky_relu(second(torch::leaky_relu(first(images), 0.2)), 0.2);
    return output(features.flatten(1)).flatten();
  }
  torch::nn::Conv2d first = nullptr, second = nullptr;
  torch::nn::Linear output = nullptr;
};
TORCH_MODULE(Discriminator);

ls::Example scale(ls::Example example) {
  example.x = example.x.to(at::kFloat).div(127.5).sub(1);
  return example;
}

// The sum over the batch, as minimize takes it.
torch::Tensor loss_of(const torch::Tensor& logits, bool real) {
  const auto labels = real ? torch::ones_like(logits) : torch::zeros_like(logits);
  return torch::binary_cross_entropy_with_logits(logits, labels, {}, {}, at::Reduction::Sum);
}

// 64 images as a picture of 8 by 8.
void write_picture(const std::string& path, const torch::Tensor& images) {
  const auto grid = images.view({8, 8, 28, 28}).transpose(1, 2).add(1).mul(127.5).to(at::kByte).contiguous();
  std::ofstream file(path, std::ios::binary);
  file << "P5 224 224 255\n";
  file.write(static_cast<const char*>(grid.data_ptr()), grid.numel());
}

void train(int epochs) {
  ls::set_random_seed(1);
  const ls::MirroredStrategy strategy;
  const auto images = ls::datasets::fashion_mnist().train.take(kImages).map(scale).cache().shuffle(kImages);
  const auto data = strategy.distribute(images.batch(64 * strategy.num_replicas_in_sync(), {.drop_remainder = true}));

  auto generator = strategy.replicate([] { return Generator(); });
  auto discriminator = strategy.replicate([] { return Discriminator(); });
  const ls::Adam adam({.learning_rate = 2e-4, .beta_1 = 0.5});
  const auto generator_optimizer = strategy.optimizer(adam, generator);
  const auto discriminator_optimizer = strategy.optimizer(adam, discriminator);

  // One step of each. The graph of the drawn images is used by both: the discriminator learns from a detached copy.
  const auto step = [&](ls::ReplicaContext& replica, Generator& draw, Discriminator& judge, const ls::Example& part) {
    const auto examples = static_cast<double>(part.size());
    const auto drawn = draw(torch::randn({part.size(), kNoise}, part.x.options()));
    const auto judged = loss_of(judge(part.x), true) + loss_of(judge(drawn.detach()), false);
    discriminator_optimizer.minimize(replica, judged, examples);

    const auto fooled = loss_of(judge(drawn), true);
    generator_optimizer.minimize(replica, fooled, examples);
    judge->zero_grad();  // backward went through it: without this, its next step would add what is not its own
    return torch::stack({judged.detach(), fooled.detach()}).cpu() / examples;
  };

  for (int epoch = 0; epoch < epochs; ++epoch) {
    auto losses = torch::zeros({2});
    std::int64_t steps = 0;
    for (auto& batch : data) {
      losses += strategy.reduce(ls::ReduceOp::mean, strategy.run(step, generator, discriminator, batch));
      ++steps;
    }
    losses /= static_cast<double>(steps);
    std::cout << "epoch " << epoch + 1 << ": loss of the discriminator " << losses[0].item<float>()
              << ", of the generator " << losses[1].item<float>() << std::endl;
  }
  generator.eval();
  const torch::NoGradGuard no_gradient;
  const auto noise = torch::randn({64, kNoise}, generator[0]->seed->weight.options());
  write_picture("gan.pgm", generator[0](noise).cpu());
  std::cout << "gan.pgm shows what it draws\n";
}

}  // namespace

int main(int argc, char** argv) {
  try {
    train(argc > 1 ? std::stoi(argv[1]) : 2);
  } catch (const ls::Error& error) {
    std::cerr << "gan: " << error.what() << "\n";
    return 1;
  }
}
