// For elastic_horovod_test: a loop with Horovod's front end some of whose ranks are lost.
#include <lockstep/horovod.h>
#include <signal.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <ATen/ATen.h>

#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <string>

namespace ls = lockstep;
namespace hvd = lockstep::horovod;

namespace {

constexpr std::int64_t kExamples = 240, kBatch = 4;
constexpr int kGpuOfNewcomer = 3;

int number(const char* name, int otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoi(value);
}

// A rank's GPU where there are some.
at::Device device_of(int local_rank) {
  return at::hasCUDA() ? at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(local_rank)) : at::Device(at::kCPU);
}

// All processes get the same net.
torch::nn::Linear net_of() {
  torch::nn::Linear net(6, 3);
  net->to(at::kDouble);
  const at::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) parameter.fill_(0.1);
  return net;
}

at::Tensor inputs() { return at::sin(at::arange(kExamples * 6, at::kDouble)).view({kExamples, 6}); }

at::Tensor loss_of(torch::nn::Linear& net, const at::Tensor& x) {
  return (net(x) - x.cumsum(1).slice(1, 2, 5)).square().mean();
}

torch::optim::SGD sgd_of(torch::nn::Linear& net) {
  return torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
}

// The next backward ends this process when the others have been told that it runs. Others on GPUs do not wait for it
// meanwhile, and go on to their next commit.
void die_in_backward(torch::nn::Linear& net) {
  const auto gradients = std::make_shared<int>(0);
  for (auto& parameter : net->parameters()) {
    parameter.register_hook([gradients](const at::Tensor&) {
      if (++*gradients < 2) return;
      usleep(500'000);
      raise(SIGKILL);
    });
  }
}

void print_result(const torch::nn::Linear& net, std::int64_t batches) {
  std::cout << std::setprecision(15) << "batches " << batches << ", weights";
  for (const auto& parameter : net->parameters()) {
    std::cout << " " << parameter.sum().item<double>() << " " << parameter.square().sum().item<double>();
  }
  std::cout << std::endl;
}

// A plain loop with the batches that the ranks make together: of three ranks, and of two from batch `lost_at` on.
void train_alone(int epochs, std::int64_t lost_at) {
  auto net = net_of();
  auto sgd = sgd_of(net);
  std::int64_t batches = 0;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (std::int64_t begin = 0; begin < kExamples; ++batches) {
      const auto size = (batches < lost_at ? 3 : 2) * kBatch;
      sgd.zero_grad();
      loss_of(net, inputs().slice(0, begin, begin + size)).backward();
      sgd.step();
      begin += size;
    }
  }
  print_result(net, batches);
}

}  // namespace

// The environment: EPOCHS of the same examples in the same order; STEP_MS of work in each batch. Rank VICTIM is killed
// in batch number BATCH, from 0 on, and where PLACE is "backward" in the middle of its backward. Where PLACE is
// "print", the rank prints that it is there. Who joins prints when. ALONE: trains in this process as the ranks do, with
// the batches of two from batch BATCH on.
int main() {
  try {
    if (number("ALONE", 0) == 1) {
      train_alone(number("EPOCHS", 3), number("BATCH", 1 << 30));
      return 0;
    }
    std::cout << "rank at " << getpid() << std::endl;
    hvd::init();
    const bool joins = number("LOCKSTEP_JOIN", 0) == 1;
    const bool is_victim = !joins && hvd::rank() == number("VICTIM", -1);
    const char* const given = std::getenv("PLACE");
    const std::string place = given == nullptr ? "" : given;
    auto net = net_of();
    const auto device = device_of(joins ? kGpuOfNewcomer : hvd::local_rank());
    const c10::OptionalDeviceGuard guard(device.is_cuda() ? std::optional(device) : std::nullopt);
    net->to(device);
    std::cout << "trains on " << device << std::endl;
    auto sgd = sgd_of(net);
    hvd::DistributedOptimizer optimizer(sgd);
    hvd::elastic::ElasticSampler sampler(kExamples, false);
    std::int64_t epoch = 0, batches = 0;
    hvd::elastic::TorchState state(
        *net, sgd, {{"epoch", ls::track(epoch)}, {"batches", ls::track(batches)}, {"sampler", sampler.trackable()}});
    int resets = 0;
    state.register_reset_callbacks({[&] { std::cout << "reset " << ++resets << ": " << hvd::size() << std::endl; }});
    bool has_joined = !joins;
    const auto train = hvd::elastic::run([&](hvd::elastic::State&) {
      for (; epoch < number("EPOCHS", 3); sampler.set_epoch(++epoch)) {
        for (std::int64_t batch = 0; batch < sampler.batches(kBatch); ++batch) {
          if (!std::exchange(has_joined, true)) std::cout << "joined at batch " << batches << std::endl;
          usleep(static_cast<unsigned>(number("STEP_MS", 0)) * 1000);
          if (is_victim && batches == number("BATCH", -1)) {
            if (place == "print") std::cout << "batch " << batches << std::endl;
            if (place == "backward") die_in_backward(net);
            if (place.empty()) raise(SIGKILL);
          }
          const auto x = inputs().index_select(0, at::tensor(sampler.get_indices(batch, kBatch))).to(device);
          optimizer.zero_grad();
          loss_of(net, x).backward();
          optimizer.step();
          sampler.record_batch(batch, kBatch);
          ++batches;
          state.commit();
        }
      }
    });
    train(state);
    print_result(net, batches);
    return 0;
  } catch (const ls::Interrupted&) {
    std::cout << "left" << std::endl;
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "failed: " << error.what() << std::endl;
    return 1;
  }
}
