// Updates on simulated GPUs that break off, or whose sums fail later.
#include <atomic>

#include "tests/gpu_loop.h"

namespace lockstep {
namespace {

class GpuUpdates : public GpuStrategies {};

// Descends by half the gradient. The device rule throws on one GPU when it is told to.
struct HalfRule final : SpanRule<HalfRule> {
  std::string name() const override { return "half"; }
  std::vector<StateSpec> states() const override { return {}; }
  template <class T>
  void apply(const UpdateStep&, std::span<T> value, std::span<const T> gradient, std::span<T* const>) const {
    for (std::size_t i = 0; i < value.size(); ++i) value[i] -= gradient[i] / 2;
  }
};

struct HalfOnDevice final : DeviceRule {
  HalfOnDevice(at::Device its_device, const std::atomic<bool>& is_full) : device(its_device), full(is_full) {}
  std::vector<double> numbers(const UpdateStep&) const override { return {}; }
  void update(const DeviceParameters& all, const std::vector<Tensor>&) override {
    if (full && device.index() == 1) throw InvalidArgument("out of memory, as asked for");
    for (std::size_t i = 0; i < all.values.size(); ++i) all.values[i].sub_(all.gradients[i] / 2);
  }
  const at::Device device;
  const std::atomic<bool>& full;
};

TEST_P(GpuUpdates, AnUpdateThatBrokeOffOnOneGpuIsToldUntilAllIsLoaded) {
  static std::atomic<bool> full = false;
  register_device_rule<HalfRule>([](const HalfRule&, const at::TensorOptions& options) {
    return std::make_unique<HalfOnDevice>(options.device(), full);
  });
  Loop loop(mirrored(), Optimizer(std::make_shared<HalfRule>(), {}));
  loop.step(examples(0));
  Archive archive;
  loop.state().save(archive, "optimizer");
  loop.net().save(archive, "net");
  full = true;
  expect_says(message_of([&] { loop.step(examples(1)); }), "out of memory, as asked for");
  full = false;
  expect_says(message_of([&] { loop.step(examples(2)); }), "an earlier update broke off");
  loop.state().load(archive, "optimizer")();
  expect_says(message_of([&] { loop.step(examples(2)); }), "load both from a checkpoint");
  loop.net().load(archive, "net")();
  loop.step(examples(3));
  expect_equal_copies(loop);
}

// NCCL finds an error in sums that an update has used already.
TEST_P(GpuUpdates, AnUpdateOfSumsThatFailLaterIsToldUntilAllIsLoaded) {
  for (const bool sharded : {false, true}) {
    expect_no_errors(
        run_workers({.workers = 1, .replicas = GetParam(), .shard_optimizer_state = sharded}, [](const auto& strategy) {
          Loop loop(strategy, Adam());
          loop.step(examples(0));
          Archive archive;
          loop.state().save(archive, "optimizer");
          loop.net().save(archive, "net");
          simulated_nccl_fault("async-error", 0);
          bool has_failed = false;
          for (int step = 1; step < 4 && !has_failed; ++step) {
            try {
              loop.step(examples(step));
            } catch (const Error&) {
              has_failed = true;
            }
          }
          EXPECT_TRUE(has_failed);
          simulated_nccl_fault(nullptr, 0);
          try {  // the sums may have failed before the update, or after
            loop.step(examples(4));
            expect_equal_copies(loop);
          } catch (const Error& error) {
            expect_says(error.what(), "an earlier update broke off");
          }
          loop.net().load(archive, "net")();
          loop.state().load(archive, "optimizer")();
          loop.step(examples(5));
          expect_equal_copies(loop);
        }));
  }
}

INSTANTIATE_TEST_SUITE_P(Replicas, GpuUpdates, testing::Values(2, 3));

}  // namespace
}  // namespace lockstep
