// Programs are compiled for TPUs that are not here, by libtpu (tools/bootstrap --tpu).
#include <gtest/gtest.h>

#include "base/text.h"
#include "tpu/pjrt/executable.h"
#include "tpu/pjrt/stablehlo.h"

namespace lockstep::pjrt {
namespace {

struct Chips {
  const char *name, *kind;
  int devices;
};

class Topologies : public testing::TestWithParam<Chips> {};

// Each device multiplies its matrix by itself, and the results are added.
TEST_P(Topologies, CompileForAllTheirDevices) {
  const auto topology = Topology::create(Plugin::load(TPU_PLUGIN), GetParam().name);
  EXPECT_EQ(topology.devices(), GetParam().devices);
  EXPECT_EQ(topology.kind(), GetParam().kind);
  constexpr std::int64_t kSize = 512;
  ProgramText text;
  const auto x = text.argument({DType::float32, {kSize, kSize}});
  const auto sum = text.all_reduce("stablehlo.add", {text.dot(x, x, {1}, {0})}, topology.devices())[0];
  const auto program = topology.compile(text.finish({sum}, {}, topology.devices()), {.replicas = topology.devices()});
  EXPECT_EQ(program.memory().arguments, kSize * kSize * 4);
  EXPECT_GE(program.flops(), 2.0 * kSize * kSize * kSize);
  EXPECT_FALSE(program.serialize().empty());
}

INSTANTIATE_TEST_SUITE_P(Chips, Topologies,
                         testing::Values(Chips{"v5e:2x2", "TPU v5 lite", 4}, Chips{"v5e:2x4", "TPU v5 lite", 8},
                                         Chips{"v4:2x2x1", "TPU v4", 8}, Chips{"v6e:2x4", "TPU v6 lite", 8}));

}  // namespace
}  // namespace lockstep::pjrt
