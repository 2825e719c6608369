#include "elastic/group_of_generation.h"

#include <thread>

#include "base/stop.h"
#include "base/text.h"
#include "elastic/next_generation.h"
#include "lockstep/base/error.h"

namespace lockstep::elastic {
namespace {

constexpr std::chrono::milliseconds kBetweenChecks(100);  // for members that have gone
constexpr std::chrono::seconds kToFindOut(15);            // that one has: with etcd when its lease ends

}  // namespace

Group group_of_generation(const Job& job, const GroupOptions& options) {
  const auto registry = job.registry();
  const auto lost = [&] { return first_gone(job.members(), *registry); };
  const std::jthread watch([&](const std::stop_token& stop) {
    try {
      while (!stop_requested_by(Deadline::after(kBetweenChecks), stop)) {
        if (const auto rank = lost()) return job.fail_waiters(text("worker ", *rank, " is lost"));
      }
    } catch (const Error&) {  // the store is gone: job.group says so
    }
  });
  // A host that was just lost, with the store at which the members meet, counts as gone a little later.
  const auto require_loss = [&] {
    for (const auto until = Deadline::after(kToFindOut); !until.passed(); std::this_thread::sleep_for(kBetweenChecks)) {
      if (const auto rank = lost()) throw PeerLost(*rank, job.world().generation, "its process or its host is gone");
    }
  };
  try {
    return job.group(options);
  } catch (const PeerLost&) {
    throw;
  } catch (const DeadlineExceeded& late) {
    if (late.ranks().empty()) require_loss();
    throw;
  } catch (const ClusterError&) {
    require_loss();
    throw;
  }
}

}  // namespace lockstep::elastic
