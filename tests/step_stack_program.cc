// For step_stack_test.py: trains one step, and prints the stack of each question for the learning rate, outermost frame
// last: a library or program, and the frame's place in that file.
#include <dlfcn.h>
#include <execinfo.h>
#include <lockstep/lockstep.h>

#include <ATen/ATen.h>

#include <array>
#include <iostream>

namespace {

double rate_of_stack(std::int64_t /*iteration*/) {
  std::array<void*, 64> frames{};
  const int count = backtrace(frames.data(), static_cast<int>(frames.size()));
  for (int i = 0; i < count; ++i) {
    Dl_info info{};
    if (dladdr(frames[static_cast<std::size_t>(i)], &info) == 0 || info.dli_fname == nullptr) continue;
    const auto place =
        static_cast<const char*>(frames[static_cast<std::size_t>(i)]) - static_cast<const char*>(info.dli_fbase) - 1;
    std::cout << info.dli_fname << " 0x" << std::hex << place << std::dec << "\n";
  }
  std::cout << "end of a stack" << std::endl;
  return 0.1;
}

}  // namespace

int main() {
  const auto x = at::arange(8, at::kFloat).view({4, 2});
  const auto data = lockstep::Dataset::from_tensor_slices(x, x.sum(1, true)).batch(4);
  lockstep::Sequential model({lockstep::Dense(1)});
  model.compile({.optimizer = lockstep::SGD({.learning_rate = lockstep::LearningRate(rate_of_stack)}), .loss = "mse"});
  model.fit(data, {.epochs = 1, .verbose = 0});
  return 0;
}
