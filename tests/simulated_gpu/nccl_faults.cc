#include "nccl_faults.h"

#include <cstdlib>
#include <sstream>

namespace simulated_nccl {

Faults& Faults::get() {
  static auto* const faults = new Faults;  // threads may outlive all else
  return *faults;
}

Faults::Faults() {
  const char* const given = std::getenv("LOCKSTEP_SIMULATED_NCCL_FAULT");
  if (given == nullptr) return;
  std::istringstream faults(given);
  for (std::string fault; std::getline(faults, fault, ',');) {
    const auto colon = fault.find(':');
    add(fault.substr(0, colon), colon == std::string::npos ? -1 : std::atoi(fault.c_str() + colon + 1));
  }
}

void Faults::add(const std::string& what, int rank) {
  const std::lock_guard lock(mutex_);
  faults_.push_back({what, rank});
}

void Faults::clear() {
  const std::lock_guard lock(mutex_);
  faults_.clear();
}

bool Faults::holds(const std::string& what, int rank) {
  const std::lock_guard lock(mutex_);
  return find(what, rank) != nullptr;
}

bool Faults::strikes(const std::string& what, int rank) {
  const std::lock_guard lock(mutex_);
  auto* const fault = find(what, rank);
  if (fault == nullptr) return false;
  fault->struck.insert(rank);
  return true;
}

Faults::Fault* Faults::find(const std::string& what, int rank) {
  for (auto& fault : faults_) {
    const bool concerns = fault.rank == rank || fault.rank == -1 || rank == -1;
    if (fault.what == what && concerns && !fault.struck.contains(rank)) return &fault;
  }
  return nullptr;
}

}  // namespace simulated_nccl
