#include "cli/commands.h"

#include <chrono>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/cluster/cluster.h"
#include "tpu/pjrt/client.h"

namespace lockstep::cli {

std::string find_tpu() {
  try {
    if (const auto cluster = resolve_cluster(); cluster.source == "TPU_WORKER_HOSTNAMES")
      return text("not opened: this is host ", cluster.world.rank, " of the ", cluster.world.size,
                  " of a TPU, whose processes open it together");
    const auto path = pjrt::plugin_path("");
    const auto client = pjrt::Client::create(pjrt::Plugin::load(path), Deadline::after(std::chrono::seconds(60)),
                                             pjrt::plugin_options({}));
    const auto& devices = client->devices();
    if (devices.empty()) return text("none (", path, " has no device)");
    return text(devices.size(), " x ", devices[0].kind, ", by ", path);
  } catch (const Error& error) {
    return text("none (", error.what(), ")");
  }
}

}  // namespace lockstep::cli
