// LibTorch's C++ interface changes from version to version: a version other than the build's is an error when the
// library is loaded, and not a crash later.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/version.h>

#include <cstdio>
#include <cstdlib>

namespace lockstep::ops {
namespace {

constexpr std::uint64_t kBuiltWith = TORCH_ABI_VERSION;
constexpr int kCannotBeLoaded = 127;  // the exit status of the system's loader

constexpr unsigned part(std::uint64_t version, int number) { return version >> (56 - 8 * number) & 0xff; }

[[maybe_unused]] const bool is_the_same = [] {
  const auto found = aoti_torch_abi_version();
  if (found >> 40 == kBuiltWith >> 40) return true;
  std::fprintf(
      stderr, "liblockstep was built with LibTorch %u.%u.%u and has been loaded with %u.%u.%u; build it again\n",
      part(kBuiltWith, 0), part(kBuiltWith, 1), part(kBuiltWith, 2), part(found, 0), part(found, 1), part(found, 2));
  std::_Exit(kCannotBeLoaded);
}();

}  // namespace
}  // namespace lockstep::ops
