#include "parameter_server/served_models.h"

#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "parameter_server/server_checkpoint.h"

namespace lockstep::parameter_server {

void ServedModels::add(std::int64_t model, std::string description, std::shared_ptr<ShardStore> shards) {
  MutexLock lock(mutex_);
  Served added{std::move(description), std::move(shards)};
  for (const auto& [number, served] : models_) {
    if (served.dropped) added.dropped_before.push_back(number);
  }
  models_[model] = std::move(added);
  last_added_ = model;
  changed_.notify_all();
}

std::int64_t ServedModels::add_restored(std::int64_t model, std::string description, std::shared_ptr<ShardStore> shards,
                                        const SavedModel& saved, std::int64_t chief) {
  checkpoint::ShardedArchive archive(saved.path);
  if (const auto number = model_of(archive.main()); number != saved.number) {
    throw InvalidArgument(text("the checkpoint ", saved.path, " is of another model now",
                               number ? text(" (number ", *number, " of the program)") : std::string(),
                               ": each model needs a path of its own"));
  }
  const auto steps = saved_steps_of(archive.main());
  shards->restore(archive, steps, chief);
  add_written(model, std::move(description), std::move(shards));
  return steps.end;
}

void ServedModels::add_written(std::int64_t model, std::string description, std::shared_ptr<ShardStore> shards) {
  add(model, std::move(description), std::move(shards));
  set_written(model);
}

void ServedModels::drop(std::int64_t model) {
  MutexLock lock(mutex_);
  if (const auto found = models_.find(model); found != models_.end()) found->second.dropped = true;
}

const ServedModels::Served& ServedModels::served(std::int64_t model) const {
  const auto found = models_.find(model);
  if (found != models_.end()) return found->second;
  throw InvalidArgument(text("this server has no model number ", model, "; it has ", models_.size(), " models"));
}

void ServedModels::wait(Deadline deadline, const std::string& for_what) const {
  if (closed_) throw Aborted("this server is ending");
  const bool in_time = changed_.wait_until(mutex_, deadline.time()) == std::cv_status::no_timeout;
  if (!in_time) throw DeadlineExceeded("waiting until " + for_what, deadline.waited());
}

void ServedModels::close() {
  MutexLock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

std::shared_ptr<ShardStore> ServedModels::find(std::int64_t model) const {
  MutexLock lock(mutex_);
  return served(model).shards;
}

void ServedModels::open(std::int64_t model, const std::string& user, const std::string& description,
                        Deadline deadline) {
  MutexLock lock(mutex_);
  while (!models_.contains(model)) wait(deadline, text("the server makes model number ", model));
  auto& opened = models_[model];
  const auto& mine = opened.description;
  if (mine == description) {
    opened.users.insert(user);
    if (static_cast<int>(opened.users.size()) < users_) return;
    for (const auto number : std::exchange(opened.dropped_before, {})) models_.erase(number);
    return;
  }
  const auto [ours, theirs] = first_difference(mine, description);
  throw InvalidArgument(text("the processes' models differ: the server has ", ours, ", and it is asked for ", theirs));
}

std::shared_ptr<ShardStore> ServedModels::find_written(std::int64_t model) const {
  MutexLock lock(mutex_);
  const auto found = models_.find(model);
  return found != models_.end() && found->second.written ? found->second.shards : nullptr;
}

std::shared_ptr<ShardStore> ServedModels::wait_for_values(std::int64_t model, Deadline deadline) const {
  MutexLock lock(mutex_);
  while (!served(model).written) wait(deadline, "the chief has written the first values");
  return served(model).shards;
}

std::int64_t ServedModels::write(std::int64_t model, std::span<const std::byte* const> shards) {
  const auto transfer = find(model)->write(shards);
  set_written(model);
  return transfer;
}

void ServedModels::set_written(std::int64_t model) {
  MutexLock lock(mutex_);
  served(model);
  models_[model].written = true;
  changed_.notify_all();
}

void ServedModels::wait_for(std::int64_t model, Deadline deadline) const {
  MutexLock lock(mutex_);
  while (model > last_added_) wait(deadline, text("the server makes model number ", model));
}

std::int64_t ServedModels::restore(std::int64_t model, const std::string& checkpoint,
                                   std::optional<std::int64_t> chief) {
  checkpoint::ShardedArchive archive(checkpoint);
  const auto transfer = find(model)->restore(archive, saved_steps_of(archive.main()), chief);
  if (chief) set_written(model);
  return transfer;
}

}  // namespace lockstep::parameter_server
