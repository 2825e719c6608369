#include "cli/find_tpu.h"

#include "base/text.h"
#include "lockstep/base/error.h"
#include "pjrt/client.h"
#include "pjrt/named_values.h"

namespace lockstep::cli {

std::string find_tpu() {
  try {
    const auto path = pjrt::plugin_path("");
    const auto client = pjrt::Client::create(pjrt::Plugin::load(path), pjrt::plugin_options({}));
    const auto& devices = client->devices();
    if (devices.empty()) return text("none (", path, " has no device)");
    return text(devices.size(), " x ", devices[0].kind, ", by ", path);
  } catch (const Error& error) {
    return text("none (", error.what(), ")");
  }
}

}  // namespace lockstep::cli
