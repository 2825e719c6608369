#include <ATen/Parallel.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/version.h>

#include <cstdio>
#include <cstdlib>

#include "cluster/cpu_partition.h"

namespace lockstep::ops {

// LibTorch's C++ interface changes from version to version: a version other than the build's is an error when the
// library is loaded, and not a crash later.

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

// LibTorch's threads of a process that trains beside others: as many as the process has cores. More would wait for each
// other's turns on these, a hundred times longer than they compute.

namespace {

[[maybe_unused]] const bool is_registered = [] {
  // `last`: LibTorch's own number, or what was set here. Another one is the user's, by a variable or set_num_threads.
  cluster::after_partition([last = at::get_num_threads()](int cores) mutable {
    const bool is_users = std::getenv("OMP_NUM_THREADS") != nullptr || std::getenv("MKL_NUM_THREADS") != nullptr ||
                          at::get_num_threads() != last;
    if (is_users || cores >= last) return;
    at::set_num_threads(cores);
    last = cores;
  });
  return true;
}();

}  // namespace

}  // namespace lockstep::ops
