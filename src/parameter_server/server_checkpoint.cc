#include "parameter_server/server_checkpoint.h"

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/files.h"
#include "checkpoint/sharded_archive.h"
#include "lockstep/base/error.h"

namespace lockstep::parameter_server {
namespace {

constexpr const char* kSteps = "servers/steps";
constexpr const char* kUpdates = "servers/updates";
constexpr const char* kModel = "servers/model";

// All servers begin their copies between two steps, the same on all. Returns the number of steps before.
std::int64_t cut(Coordinator& coordinator, const Client& client, const std::function<void()>& write_values,
                 Deadline deadline) {
  const auto end = coordinator.hold(client.model());
  const std::shared_ptr<void> release(nullptr, [&](void*) { coordinator.release(); });
  while (!client.cut(end, deadline)) write_values();
  return end;
}

// The servers' files, then the main file. Returns how many steps were applied; nothing where a server has no cut.
std::optional<std::int64_t> try_to_write(const Client& client, const std::string& file,
                                         const Coordinator::Finished& steps, Archive archive, Deadline deadline) {
  checkpoint::RowsFolder rows(file);
  const auto updates = client.save(steps.end, rows.folder(), archive, deadline);
  if (!updates) return std::nullopt;
  archive.entries[kSteps] = std::to_string(steps.end);
  archive.entries[kUpdates] = std::to_string(*updates);
  archive.entries[kModel] = std::to_string(client.model());
  for (std::size_t i = 0; i < steps.uncounted.size(); ++i) {
    archive.set_numbers(text(checkpoint::kUncountedSteps, i), steps.uncounted[i]);
  }
  write_archive(file, archive);
  rows.keep();
  return updates;
}

// Calls attempt() until it returns a number.
std::int64_t until_written(const std::string& file, Deadline deadline,
                           const std::function<std::optional<std::int64_t>()>& attempt) {
  while (true) {
    if (const auto updates = attempt()) return *updates;
    if (deadline.passed()) throw DeadlineExceeded("writing the checkpoint " + file, deadline.waited());
    log_warning(text("a server was started again while the checkpoint ", file, " was written: it is begun anew"));
  }
}

}  // namespace

void write_checkpoint(Coordinator& coordinator, const Client& client, const std::string& path,
                      const std::function<Archive()>& own_state, const std::function<void()>& write_values,
                      Deadline deadline) {
  const auto file = checkpoint::absolute_path(checkpoint_file(path)).string();
  std::int64_t end = 0;
  until_written(file, deadline, [&] {
    const auto begun = cut(coordinator, client, write_values, deadline);
    const auto steps = coordinator.wait_for_begun(client.model(), begun, deadline);
    end = steps.end;
    return try_to_write(client, file, steps, own_state(), deadline);
  });
  coordinator.tell_saved(client.model(), end);
}

SavedSteps write_loop_checkpoint(StepQueue& steps, const Client& client, const std::string& path,
                                 const std::function<void()>& write_values, Deadline deadline) {
  const auto file = checkpoint::absolute_path(checkpoint_file(path)).string();
  const auto end = steps.end_of_finished();
  const auto updates = until_written(file, deadline, [&] {
    while (!client.cut(end, deadline)) write_values();
    return try_to_write(client, file, {.end = end}, {}, deadline);
  });
  return {end, updates};
}

std::optional<std::int64_t> model_of(const Archive& main) {
  return main.entries.contains(kModel) ? std::optional(main.integer(kModel)) : std::nullopt;
}

Coordinator::Finished steps_of(const Archive& main) {
  if (!main.entries.contains(kSteps)) return {.end = main.integer("optimizer/iterations")};
  Coordinator::Finished steps{.end = main.integer(kSteps), .uncounted = checkpoint::uncounted_steps(main)};
  if (steps.end >= 0) return steps;
  throw DataError(text("the checkpoint is of ", steps.end, " steps"));
}

SavedSteps saved_steps_of(const Archive& main) {
  const auto end = steps_of(main).end;
  const auto updates = main.entries.contains(kUpdates) ? main.integer(kUpdates) : end;
  if (updates >= 0 && updates <= end) return {end, updates};
  throw DataError(text("the checkpoint is of ", updates, " updates in ", end, " steps"));
}

}  // namespace lockstep::parameter_server
