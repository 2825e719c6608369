// Training goes on in the processes that are left when one was killed: on CPUs, or on GPUs where there are some.
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <csignal>
#include <memory>
#include <sstream>

#include "base/child_process_testing.h"
#include "base/text.h"
#include "cluster/store_process_testing.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/elastic/job.h"

namespace lockstep::ddp {
namespace {

constexpr int kRanks = 3, kLost = 1, kSteps = 8, kLostAt = 3;

at::Device device_of(int process) {
  return at::hasCUDA() ? at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(process)) : at::Device(at::kCPU);
}

torch::nn::Linear make_regrouped_net() {
  torch::manual_seed(5);
  torch::nn::Linear net(4, 3);
  net->to(at::kDouble);
  return net;
}

at::Tensor example_of(int process, int step, std::int64_t size) {
  return at::sin(at::arange(2 * size, at::kDouble).view({2, size}) + 7 * process + step);
}

at::Tensor regrouped_loss_of(const at::Tensor& output, int process, int step) {
  return torch::nn::functional::mse_loss(output, example_of(process, step, 3).to(output.device()));
}

torch::optim::SGD make_optimizer(torch::nn::Linear& net) {
  return torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1));
}

std::string text_of(torch::nn::Linear& net) {
  std::ostringstream out;
  torch::save(at::cat({net->weight.detach().flatten(), net->bias.detach()}).cpu(), out);
  return out.str();
}

// Returns the parameters with which a process ends.
std::string train(const std::string& store, int process, const std::string& backend) {
  const auto in_regroup_time = [] { return Deadline::after(std::chrono::seconds(30)); };
  const GroupOptions options{.backend = backend, .timeout_seconds = 30};
  Cluster cluster;
  cluster.world.rank = cluster.world.local_rank = process;
  cluster.world.size = cluster.world.local_size = kRanks;
  cluster.store = store;
  cluster.source = "lockstep run";
  Job job(cluster, 30);
  const Communicator ranks(job.group(options), 30);
  const auto device = device_of(process);
  const c10::OptionalDeviceGuard guard(device.is_cuda() ? std::optional(device) : std::nullopt);
  auto net = make_regrouped_net();
  net->to(device);
  auto sgd = make_optimizer(net);
  DistributedDataParallel ddp(net, ranks);
  for (int step = 0; step < kSteps;) {
    try {
      sgd.zero_grad();
      const auto loss = regrouped_loss_of(ddp(example_of(process, step, 4).to(device)), process, step);
      if (process == kLost && step == kLostAt) ::raise(SIGKILL);
      loss.backward();
      ranks.group().synchronize(ranks.deadline());  // on a GPU a call fails after it returned
      sgd.step();
      ++step;
    } catch (const PeerLost& lost) {
      job = job.regroup({lost.rank()}, in_regroup_time());
      ranks.regroup(job.group(options));
    }
  }
  if (job.size() != kRanks - 1 || job.world().generation != 1) return "the wrong processes went on";
  return text_of(net);
}

std::string trained_by_a_plain_loop() {
  auto net = make_regrouped_net();
  auto sgd = make_optimizer(net);
  for (int step = 0; step < kSteps; ++step) {
    sgd.zero_grad();
    std::vector<at::Tensor> losses;
    for (int process = 0; process < kRanks; ++process) {
      if (process != kLost || step < kLostAt)
        losses.push_back(regrouped_loss_of(net(example_of(process, step, 4)), process, step));
    }
    at::stack(losses).mean().backward();
    sgd.step();
  }
  return text_of(net);
}

at::Tensor parameters_in(const std::string& bytes) {
  at::Tensor parameters;
  std::istringstream in(bytes);
  torch::load(parameters, in);
  return parameters;
}

class Regroup : public testing::TestWithParam<const char*> {};

TEST_P(Regroup, ThoseThatAreLeftTrainOn) {
  const cluster::StoreProcess store;
  std::vector<std::unique_ptr<ChildProcess>> processes;
  for (int process = 0; process < kRanks; ++process) {
    processes.push_back(std::make_unique<ChildProcess>([&] { return train(store.address(), process, GetParam()); }));
  }
  std::vector<std::string> ends;
  for (const auto& process : processes) ends.push_back(process->said());
  EXPECT_TRUE(WIFSIGNALED(processes[kLost]->status()));
  EXPECT_EQ(ends[0], ends[2]);
  ChildProcess plain_loop(trained_by_a_plain_loop);  // where there are GPUs, a backward here would end those of forks
  const auto expected = parameters_in(plain_loop.said());
  EXPECT_LT((parameters_in(ends[0]) - expected).abs().max().item<double>(), 1e-12) << ends[0];
}
INSTANTIATE_TEST_SUITE_P(Ddp, Regroup, testing::Values("shm", "tcp"));

}  // namespace
}  // namespace lockstep::ddp
