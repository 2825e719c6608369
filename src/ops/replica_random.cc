#include "ops/replica_random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <torch/library.h>

namespace lockstep::ops {
namespace {

// "A generic mode, toggled on and off" in LibTorch's words, and used by nothing else in it.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// LibTorch gives it, as the dispatch key, to the threads of devices, which compute backward. It uses the kind in its
// own tests alone.
constexpr auto kInfo = c10::DebugInfoKind::TEST_INFO_2;

struct CurrentGenerator final : c10::DebugInfoBase {
  explicit CurrentGenerator(at::Generator of) : generator(std::move(of)) {}
  const at::Generator generator;
};

const at::Generator* current_generator() {
  const auto* const found = static_cast<CurrentGenerator*>(c10::ThreadLocalDebugInfo::get(kInfo));
  return found == nullptr ? nullptr : &found->generator;
}

bool on_cpu(const c10::IValue& value) { return value.isTensor() && value.toTensor().device().is_cpu(); }

// Calls `op` again with the current generator in place of a missing one.
void fill_generator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(kKey);
  const auto& arguments = op.schema().arguments();
  const auto first = stack->size() - arguments.size();
  bool cpu = false;
  for (std::size_t i = 0; i < arguments.size(); ++i) cpu = cpu || on_cpu((*stack)[first + i]);
  const auto* const current = current_generator();
  for (std::size_t i = 0; cpu && current != nullptr && i < arguments.size(); ++i) {
    auto& value = (*stack)[first + i];
    if (arguments[i].name() == "generator" && value.isNone()) value = *current;
  }
  op.callBoxed(stack);
}

// LibTorch's operators that draw random numbers; the others (rand, randn, dropout, rand_like, ...) call these.
constexpr const char* kRandomOperators[] = {"bernoulli.out",
                                            "bernoulli_.Tensor",
                                            "bernoulli_.float",
                                            "uniform_",
                                            "normal_",
                                            "normal.Tensor_float",
                                            "normal.float_Tensor",
                                            "normal.Tensor_Tensor",
                                            "normal.Tensor_float_out",
                                            "normal.float_Tensor_out",
                                            "normal.Tensor_Tensor_out",
                                            "random_",
                                            "random_.from",
                                            "random_.to",
                                            "exponential_",
                                            "geometric_",
                                            "cauchy_",
                                            "log_normal_",
                                            "multinomial",
                                            "poisson",
                                            "binomial",
                                            "_standard_gamma",
                                            "_sample_dirichlet",
                                            "rrelu_with_noise",
                                            "rrelu_with_noise_",
                                            "randperm.generator_out"};

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, library) {
  for (const char* name : kRandomOperators) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fill_generator>());
  }
}

}  // namespace

ReplicaRandom::ReplicaRandom(c10::Device device) : device_(device), generator_(at::detail::createCPUGenerator()) {}

void ReplicaRandom::seed(std::uint64_t seed) {
  generator_.set_current_seed(seed);
  if (device_.is_cpu()) return;
  auto generator = at::globalContext().defaultGenerator(device_);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);
}

ReplicaRandom::Use::Use(ReplicaRandom& random)
    : generator_(kInfo, std::make_shared<CurrentGenerator>(random.generator_)), key_(kKey) {}

at::Generator generator_of_thread() {
  const auto* const current = current_generator();
  return current != nullptr ? *current : at::detail::getDefaultCPUGenerator();
}

at::Tensor state_of_generator(c10::Device gpu) {
  auto generator = at::globalContext().defaultGenerator(gpu);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_state_of_generator(c10::Device gpu, const at::Tensor& state) {
  auto generator = at::globalContext().defaultGenerator(gpu);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace lockstep::ops
