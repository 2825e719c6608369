// -H, hostfiles, and what a launcher on another host is told.
#include "cluster/launch/hosts.h"
#include "cluster/launch/host_part.h"
#include "tests/fuzz/fuzz.h"

void lockstep::fuzz(const std::string& bytes) {
  if (bytes.empty()) return;
  const auto rest = bytes.substr(1);
  switch (bytes[0] % 3) {
    case 0: launch::parse_hosts(rest); break;
    case 1: launch::parse_hostfile(rest, "hosts"); break;
    default: ranks_of(launch::part_in(rest), "/token");
  }
}
