// A checkpoint that the workers write together while they train on.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/shared_archive.h"
#include "train/model_impl.h"

namespace lockstep::train {

// The full state, or the weights, at one moment. Each worker that sees the chief's folder copies and writes a part of
// the variables and of the optimizer's state. The chief writes the rest.
struct SharedSave {
  std::function<void()> write;                         // this worker's part, in any thread; throws IoError
  std::shared_ptr<checkpoint::SharedArchive> archive;  // the chief's, whose `write` waits for the others; else null

  // Copies what will be written. Collective, between steps. Throws IoError, on all, where the chief cannot begin.
  static SharedSave begin(ModelImpl& impl, const StateFile& file);
};

}  // namespace lockstep::train

namespace lockstep {

// The checkpoint that a callback is writing while the training goes on. Writes in a thread of its own. One thread calls
// it, between steps. The destructor waits.
class BackgroundSave {
 public:
  // Copies what is saved, and begins to write it. The chief's thread makes the file. Gives up an earlier save that is
  // not whole. Collective; throws IoError on all.
  void begin(ModelImpl& impl, const train::StateFile& file);

  // Waits until all workers have written the save that was begun. Collective; throws IoError on all. Then was_lost,
  // also collective, returns whether the save is not whole since workers were lost.
  void finish(const ModelImpl& impl);
  bool was_lost(ModelImpl& impl);

  // Returns true where a save was begun, and not finished.
  bool is_pending() const { return path_.has_value(); }

  // Called where a fit begins, or this worker comes to one. Not collective.
  void start(const ModelImpl& impl);

  // Returns true where workers have changed since the last call, as all of them see, and the save that was begun is not
  // whole. Then the save, with those before, was given up on all. For elastic strategies. Collective only where the
  // workers have changed.
  bool is_lost(ModelImpl& impl);

  // Gives up the save that was begun, unless it becomes whole in this time: a fit ends. Not collective.
  void give_up(std::chrono::seconds after) noexcept;

 private:
  void wait();  // until the write that was begun has ended; throws what that threw, once
  bool is_whole() const { return !path_ || (archive_ && is_written_); }

  std::atomic<bool> is_written_ = false;  // the write that was begun has ended well
  std::future<void> writing_;
  std::shared_ptr<checkpoint::SharedArchive> archive_;  // on the chief
  std::optional<std::string> path_;                     // of the save that was begun, until it is known to be whole
  bool was_lost_ = false;
  std::int64_t begun_in_ = 0;  // the Group's number of regroups then
  std::int64_t seen_ = 0;      // the generation at the last call of is_lost
};

}  // namespace lockstep
