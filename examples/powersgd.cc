// A gradient hook of your own: PowerSGD, which sends a matrix of gradients as the product of two thin ones.
//   build/release/lockstep run -n 2 build/release/examples/powersgd
// Vogels et al., "PowerSGD: practical low-rank gradient compression for distributed optimization", NeurIPS 2019.
#include <ATen/ATen.h>
#include <lockstep/ddp.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <cmath>
#include <iostream>
#include <map>

#include "arguments.h"

namespace ls = lockstep;

namespace {

class PowerSgd {
 public:
  explicit PowerSgd(std::int64_t rank) : rank_(rank) {}
  // Begins to make the bucket's gradients their mean over the ranks.
  ls::Work operator()(const ls::Group& group, const ls::GradientBucket& bucket, ls::Deadline deadline) {
    const auto all = at::from_blob(bucket.buffer.data, {static_cast<std::int64_t>(bucket.buffer.count)}, at::kFloat);
    const auto marks = static_cast<std::int64_t>(bucket.parameters.size());  // 1 for each parameter with a gradient
    const auto gradients = all.narrow(0, 0, all.numel() - marks), flags = all.narrow(0, gradients.numel(), marks);
    auto& state = states_[bucket.index];
    if (state.error.numel() != gradients.numel())
      state = begin(gradients.numel());  // buckets change after a first pass
    const auto reduce = [gradients, flags, &state](const ls::Group::RunCalls& run) {
      const at::NoGradGuard no_gradient;
      const auto mean = [&](const at::Tensor& tensor) {
        run({ls::Call::all_reduce(ls::buffer_of(tensor), ls::ReduceOp::mean)});
      };
      const auto wanted = gradients + state.error;
      const auto matrix = at::constant_pad_nd(wanted, {0, state.rows * state.columns - wanted.numel()})
                              .view({state.rows, state.columns});
      auto p = matrix.mm(state.q);
      mean(p);
      p = std::get<0>(at::linalg_qr(p)).contiguous();
      state.q = matrix.t().mm(p);
      mean(state.q);
      gradients.copy_(p.mm(state.q.t()).view({-1}).narrow(0, 0, wanted.numel()));
      state.error = wanted - gradients;
      mean(flags);
    };
    return group.start(reduce, bucket.buffer.device, deadline);
  }

 private:
  struct State {
    std::int64_t rows = 0, columns = 0;
    at::Tensor q, error;  // [columns, rank], and what the product has lost so far
  };

  State begin(std::int64_t numel) const {
    const auto rows = static_cast<std::int64_t>(std::ceil(std::sqrt(static_cast<double>(numel))));
    const auto columns = (numel + rows - 1) / rows;
    auto generator = at::detail::createCPUGenerator(1);  // all ranks begin alike
    return {rows, columns, at::randn({columns, std::min(rank_, rows)}, generator), at::zeros({numel})};
  }

  const std::int64_t rank_;
  std::map<int, State> states_;  // by the bucket's index
};

void train(const ls::Group& group, std::int64_t rank, int steps) {
  torch::nn::Linear net(64, 64), target(64, 64);
  const auto hook = std::make_shared<PowerSgd>(rank);
  ls::DistributedDataParallelOptions options;
  options.comm_hook = [hook](const auto& ranks, const auto& bucket, auto deadline) {
    return (*hook)(ranks, bucket, deadline);
  };
  ls::DistributedDataParallel ddp(net, group, options);
  ls::broadcast(group, target->weight.detach(), 0, ls::Deadline::after(std::chrono::minutes(1)));
  torch::optim::SGD sgd(net->parameters(), 2);
  for (int step = 0; step <= steps; ++step) {
    const auto x = at::randn({32, 64});  // each rank's own
    const auto loss = torch::nn::functional::mse_loss(ddp(x), at::linear(x, target->weight.detach()));
    sgd.zero_grad();
    loss.backward();
    sgd.step();
    if (group.rank() == 0 && step % 100 == 0) std::cout << "step " << step << ": loss " << loss.item<double>() << "\n";
  }
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments("PowerSGD as a gradient hook");
  std::int64_t rank = 2;
  int steps = 500;
  arguments.option("--rank", rank, "columns of the thin matrices");
  arguments.option("--steps", steps, "of training");
  arguments.parse(argc, argv);
  train(ls::Job::from_environment().group(), rank, steps);
}
