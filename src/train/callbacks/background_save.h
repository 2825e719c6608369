// The checkpoint that a callback is writing while the training goes on.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/background_writer.h"
#include "train/shared_save.h"

namespace lockstep {

// One thread, between steps.
class BackgroundSave {
 public:
  struct What {
    std::string path;
    bool weights_only = false;
    std::function<void(const std::function<void()>& write)> around;
  };

  // Copies what is saved, and begins to write it. `around(write)`: called on the chief, in its thread, for what belongs
  // before and behind the file's appearance. Gives up what was begun before and is not whole. Collective; throws
  // IoError on all.
  void begin(ModelImpl& impl, What what);

  // Waits until all workers have written what was begun. Collective; throws IoError on all. Afterwards was_lost, which
  // is collective too, returns whether it is not whole since workers were lost.
  void finish(const ModelImpl& impl);
  bool was_lost(ModelImpl& impl);

  // Whether anything was begun, and not finished.
  bool is_pending() const { return path_.has_value(); }

  // A fit begins, or this worker comes to one. Not collective.
  void start(const ModelImpl& impl);

  // With an elastic strategy: whether the workers are others than when this was last called, which is the same for all
  // of them; and whether what was begun, with those before, was given up since it is not whole, on all. Not collective,
  // unless there are others.
  bool is_lost(ModelImpl& impl);

  // Gives up what was begun, unless it becomes whole in this time; a fit ends. Not collective.
  void give_up(std::chrono::seconds after) noexcept;

 private:
  bool is_whole() const { return !path_ || (archive_ && writer_.ended()); }

  checkpoint::BackgroundWriter writer_;
  std::shared_ptr<checkpoint::SharedArchive> archive_;  // on the chief
  std::optional<std::string> path_;                     // of what was begun, until it is known to be whole
  bool was_lost_ = false;
  std::int64_t begun_in_ = 0;  // which Group, by its number of regroups
  std::int64_t seen_ = 0;      // the generation at the last call of is_lost
};

}  // namespace lockstep
