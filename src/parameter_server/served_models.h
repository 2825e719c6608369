// The models of which this server has shards.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/text.h"
#include "lockstep/base/deadline.h"
#include "parameter_server/shard_store.h"

namespace lockstep::parameter_server {

// A model's entry in the job's store, for processes that are started again.
inline std::string key_of_model(std::int64_t number) { return text("model ", number); }

// Nothing, one of these, or the model's last checkpoint.
inline constexpr const char* kWritten = "has first values";
inline constexpr const char* kTrained = "is trained";
inline constexpr const char* kDropped = "dropped";

// The model's last checkpoint, also once it is dropped.
inline std::string key_of_last_checkpoint(std::int64_t number) { return text("last checkpoint of model ", number); }

// A checkpoint's file, and the number that the model had in the program that wrote it; none where it was made without
// servers.
struct SavedModel {
  std::string path;
  std::optional<std::int64_t> number;
};
inline std::string print(const SavedModel& saved) {
  return text(saved.number ? std::to_string(*saved.number) : "", ":", saved.path);
}
inline SavedModel parse_checkpoint(const std::string& printed) {
  const auto colon = printed.find(':');
  const auto number = whole_number(printed.substr(0, colon));
  return {printed.substr(colon + 1), number ? std::optional<std::int64_t>(*number) : std::nullopt};
}

// Any thread. All calls throw InvalidArgument for a model that is not there, unless they wait for it.
class ServedModels {
 public:
  // `users`: the number of other processes that use the models.
  explicit ServedModels(int users) : users_(users) {}

  // Models are numbered as the program makes them. After `drop` a model is kept until all others have opened a later
  // one: then they have passed this place in the program.
  void add(std::int64_t model, std::string description, std::shared_ptr<ShardStore> shards);
  void drop(std::int64_t model);

  // Add a model that this server had before it was started again: with the values of `shards`, or with those of a
  // checkpoint, whose number of steps add_restored returns. add_restored throws as ShardStore::restore, and
  // InvalidArgument where another model has replaced the checkpoint.
  void add_written(std::int64_t model, std::string description, std::shared_ptr<ShardStore> shards);
  std::int64_t add_restored(std::int64_t model, std::string description, std::shared_ptr<ShardStore> shards,
                            const SavedModel& saved, std::int64_t chief);

  // As ServerConnection's; `user` is the process that calls.
  void open(std::int64_t model, const std::string& user, const std::string& description, Deadline deadline);
  std::int64_t restore(std::int64_t model, const std::string& checkpoint, std::optional<std::int64_t> chief);
  std::int64_t write(std::int64_t model, std::span<const std::byte* const> shards);

  // The model's shards. The second waits until they have values. The third is null where there is no such model, or the
  // model has no values.
  std::shared_ptr<ShardStore> find(std::int64_t model) const;
  std::shared_ptr<ShardStore> wait_for_values(std::int64_t model, Deadline deadline) const;
  std::shared_ptr<ShardStore> find_written(std::int64_t model) const;

  // Waits until this server has made the model: it may have been started again.
  void wait_for(std::int64_t model, Deadline deadline) const;

  // Ends all waits, now and later, with Aborted: the process is ending.
  void close();

 private:
  struct Served {
    std::string description;
    std::shared_ptr<ShardStore> shards;
    bool written = false;
    bool dropped = false;
    std::vector<std::int64_t> dropped_before = {};  // models that had been dropped when this one was added
    std::set<std::string> users = {};
  };
  void set_written(std::int64_t model);
  void wait(Deadline deadline, const std::string& for_what) const
      LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));
  const Served& served(std::int64_t model) const LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));

  const int users_;
  mutable Mutex mutex_;
  mutable CondVar changed_;
  std::map<std::int64_t, Served> models_ LOCKSTEP_GUARDED_BY(mutex_);
  std::int64_t last_added_ LOCKSTEP_GUARDED_BY(mutex_) = -1;
  bool closed_ LOCKSTEP_GUARDED_BY(mutex_) = false;
};

}  // namespace lockstep::parameter_server
