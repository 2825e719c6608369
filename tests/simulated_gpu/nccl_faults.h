// The faults of the simulated NCCL, which tests ask for.
#pragma once

#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace simulated_nccl {

// Any thread may call.
class Faults {
 public:
  static Faults& get();

  void add(const std::string& what, int rank);
  void clear();

  // Returns true where a rank has the fault. Rank -1 is that of a caller who has none.
  bool holds(const std::string& what, int rank);

  // As `holds`, but a rank has each fault once.
  bool strikes(const std::string& what, int rank);

 private:
  struct Fault {
    std::string what;
    int rank;
    std::set<int> struck = {};
  };

  Faults();
  Fault* find(const std::string& what, int rank);  // requires the mutex

  std::mutex mutex_;  // protects the following
  std::vector<Fault> faults_;
};

}  // namespace simulated_nccl
