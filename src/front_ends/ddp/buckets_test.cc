// DistributedDataParallel's buckets: fewer bits, hooks, and names in timelines.
#include <fstream>
#include <sstream>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "front_ends/ddp/net_testing.h"
#include "lockstep/collective/group_wrappers.h"
#include "lockstep/ddp/distributed_data_parallel.h"

namespace lockstep::ddp {
namespace {

void expect_close_with(DType dtype) {
  collective::on_ranks(3, [&](const Group& group) {
    auto net = make_net();
    net->to(at::kFloat);
    DistributedDataParallel ddp(net, group, {.gradient_dtype = dtype});
    auto exact = make_net();
    exact->to(at::kFloat);
    float largest = 0;  // with 8 bits of all so far: they share blocks, and what was lost of a gradient is sent later
    const auto all = batches(4, 3);
    for (const auto& batch : all) {
      const auto part = part_of(batch, group.rank(), group.size());
      net->zero_grad();
      exact->zero_grad();
      const auto loss = [](const Tensor& output, const Tensor& y) { return at::mse_loss(output, y.to(at::kFloat)); };
      loss(ddp(part.x.to(at::kFloat)), part.y).backward();
      loss(exact->forward(batch.x.to(at::kFloat)), batch.y).backward();
      for (const auto& parameter : exact->parameters()) {
        if (parameter.grad().defined()) largest = std::max(largest, parameter.grad().abs().max().item<float>());
      }
      for (const auto& parameter : exact->named_parameters()) {
        if (!parameter.value().grad().defined()) continue;
        const auto mine = net->named_parameters()[parameter.key()].grad();
        if (dtype != DType::int8) largest = parameter.value().grad().abs().max().item<float>();
        // A full batch's loss by rounding counts for more in the mean of a smaller one.
        const auto smaller = dtype == DType::int8 ? static_cast<float>(all[0].x.size(0)) / batch.x.size(0) : 1;
        EXPECT_LE((mine - parameter.value().grad()).abs().max().item<float>(), 0.01 * largest * smaller)
            << parameter.key();
        auto first = mine.clone();
        group.broadcast({first.data_ptr(), static_cast<std::size_t>(first.numel()), DType::float32}, 0,
                        Deadline::after(std::chrono::seconds(30)));
        EXPECT_TRUE(first.equal(mine));
      }
    }
  });
}

TEST(Ddp, FewerBitsOnTheWireAreCloseAndTheSameOnAllRanks) {
  for (const auto dtype : {DType::bfloat16, DType::float16, DType::int8}) expect_close_with(dtype);
}

TEST(Ddp, TimelinesNameTheParameters) {
  const auto path = testing::TempDir() + "/ddp_timeline.json";
  collective::on_ranks(2, [&](const Group& group) {
    const auto in_time = [] { return Deadline::after(std::chrono::seconds(30)); };
    Timeline timeline;
    const auto recorded = with_timeline(group, timeline, in_time());
    const auto net = make_net(true);
    DistributedDataParallel ddp(net, recorded, {.timeout_seconds = 30});
    for (const auto& batch : batches(2, 4)) loss_of(ddp(batch.x), batch.y).backward();
    timeline.write(path, recorded, in_time());
  });
  std::ostringstream written;
  written << std::ifstream(path).rdbuf();
  expect_says(written.str(), "\"tensors\":\"");
  expect_says(written.str(), "norm.bias");
}

TEST(Ddp, AHookTakesThePlaceOfTheReduction) {
  collective::on_ranks(2, [&](const Group& group) {
    int buckets = 0;
    DistributedDataParallelOptions options{.bucket_cap_mb = 5e-4, .first_bucket_mb = 2e-4, .timeout_seconds = 30};
    options.comm_hook = [&](const Group& ranks, const GradientBucket& bucket, Deadline deadline) {
      EXPECT_EQ(bucket.index, buckets++);
      return ranks.start(Call::all_reduce(bucket.buffer, ReduceOp::max), deadline);
    };
    DistributedDataParallel ddp(make_net(), group, options);
    const auto batch = batches(1, 2)[0];
    loss_of(ddp(batch.x), batch.y).backward();  // the same on both, so that the largest is the mean
    const auto alone = make_net();
    loss_of(alone->forward(batch.x), batch.y).backward();
    EXPECT_LE((ddp->first->weight.grad() - alone->first->weight.grad()).abs().max().item<double>(), 1e-12);
    EXPECT_GE(buckets, 2);
  });
}

}  // namespace
}  // namespace lockstep::ddp
