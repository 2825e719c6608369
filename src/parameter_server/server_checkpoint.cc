#include "parameter_server/server_checkpoint.h"

#include <random>

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/files.h"
#include "checkpoint/sharded_archive.h"
#include "lockstep/base/error.h"

namespace lockstep::parameter_server {
namespace {

constexpr const char* kSteps = "servers/steps";
constexpr const char* kModel = "servers/model";
constexpr const char* kUncounted = "servers/uncounted/";

// All servers begin their copies between the same two steps. Returns the number of steps before.
std::int64_t cut(Coordinator& coordinator, const Client& client, const std::function<void()>& write_values,
                 Deadline deadline) {
  const auto end = coordinator.hold(client.model());
  const std::shared_ptr<void> release(nullptr, [&](void*) { coordinator.release(); });
  while (!client.cut(end, deadline)) write_values();
  return end;
}

// The checkpoint is whole without that.
void remove_old_rows(const std::string& file, const std::string& kept) {
  try {
    checkpoint::remove_rows_but(file, kept);
  } catch (const IoError& error) {
    log_warning(error.what());
  }
}

std::string fresh_name() {
  std::random_device random;
  return text(std::hex, random(), random());
}

}  // namespace

void write_checkpoint(Coordinator& coordinator, const Client& client, const std::string& path,
                      const std::function<Archive()>& own_state, const std::function<void()>& write_values,
                      Deadline deadline) {
  const auto file = checkpoint::absolute_path(checkpoint_file(path)).string();
  while (true) {
    const auto begun = cut(coordinator, client, write_values, deadline);
    const auto steps = coordinator.wait_for_begun(client.model(), begun, deadline);
    auto archive = own_state();
    archive.entries[kSteps] = std::to_string(steps.end);
    archive.entries[kModel] = std::to_string(client.model());
    for (std::size_t i = 0; i < steps.uncounted.size(); ++i) {
      archive.set_numbers(text(kUncounted, i), steps.uncounted[i]);
    }
    const auto name = fresh_name();
    if (client.save(steps.end, checkpoint::rows_folder(file) / name, archive, deadline)) {
      write_archive(file, archive);
      coordinator.tell_saved(client.model(), steps.end);
      remove_old_rows(file, name);
      return;
    }
    if (deadline.passed()) throw DeadlineExceeded("writing the checkpoint " + file, deadline.waited());
    log_warning(text("a server was started again while the checkpoint ", file, " was written: it is begun anew"));
  }
}

std::optional<std::int64_t> model_of(const Archive& main) {
  return main.entries.contains(kModel) ? std::optional(main.integer(kModel)) : std::nullopt;
}

Coordinator::Finished steps_of(const Archive& main) {
  if (!main.entries.contains(kSteps)) return {.end = main.integer("optimizer/iterations")};
  Coordinator::Finished steps{.end = main.integer(kSteps)};
  for (int i = 0; main.entries.contains(text(kUncounted, i)); ++i) {
    steps.uncounted.push_back(main.numbers(text(kUncounted, i)));
  }
  if (steps.end >= 0) return steps;
  throw DataError(text("the checkpoint is of ", steps.end, " steps"));
}

}  // namespace lockstep::parameter_server
