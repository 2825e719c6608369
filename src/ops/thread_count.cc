// LibTorch's threads of a process that trains beside others: as many as the process has cores. More would wait for each
// other's turns on these, a hundred times longer than they compute.
#include <ATen/Parallel.h>

#include <cstdlib>

#include "cluster/cpu_partition.h"

namespace lockstep::ops {
namespace {

// Knows if the user chose a number: by a variable, or by set_num_threads since the library was loaded.
class UsersChoice {
 public:
  bool made() const {
    return std::getenv("OMP_NUM_THREADS") != nullptr || std::getenv("MKL_NUM_THREADS") != nullptr ||
           at::get_num_threads() != last_;
  }
  void set(int threads) {
    at::set_num_threads(threads);
    last_ = threads;
  }

 private:
  int last_ = at::get_num_threads();  // LibTorch's own, or what was set here
};

[[maybe_unused]] const bool is_registered = [] {
  cluster::after_partition([threads = UsersChoice()](int cores) mutable {
    if (!threads.made() && cores < at::get_num_threads()) threads.set(cores);
  });
  return true;
}();

}  // namespace
}  // namespace lockstep::ops
