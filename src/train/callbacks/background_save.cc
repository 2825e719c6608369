#include "train/callbacks/background_save.h"

#include <utility>

#include "lockstep/base/error.h"

namespace lockstep {

void BackgroundSave::begin(ModelImpl& impl, What what) {
  give_up(std::chrono::seconds(0));
  was_lost_ = false;
  auto save = train::SharedSave::begin(impl, what.path, what.weights_only);
  archive_ = save.archive;
  path_ = what.path;
  begun_in_ = impl.workers().regroups();
  if (!archive_) return writer_.start(std::move(save.write));
  writer_.start([write = std::move(save.write), around = std::move(what.around)] { around(write); });
}

void BackgroundSave::finish(const ModelImpl& impl) {
  const auto& workers = impl.workers();
  std::string mine;
  if (!archive_) {
    try {
      writer_.wait();
    } catch (const IoError& error) {
      mine = error.what();
    }
  }
  const auto problems = workers.gather(mine, 0);
  bool lost = false;
  workers.run_on_rank_0([&] {
    std::string problem;
    for (const auto& one : problems) {
      if (problem.empty()) problem = one;
    }
    const bool others_left = path_ && workers.regroups() != begun_in_;
    // All that are here have written their parts.
    if (archive_ && (!problem.empty() || others_left)) archive_->abandon();
    try {
      writer_.wait();
    } catch (const IoError&) {
      if (problem.empty() && !others_left) throw;
    }
    if (!problem.empty()) throw IoError(problem);
    lost = !is_whole();
  });
  was_lost_ = workers.any(lost);
  archive_.reset();
  path_.reset();
}

bool BackgroundSave::is_lost(const ModelImpl& impl) {
  const auto now = impl.workers().regroups();
  if (!seen_ || *seen_ == now) {
    seen_ = now;
    return false;
  }
  const bool lost = impl.chief_says([this] { return !is_whole(); });
  seen_ = impl.workers().regroups();
  if (lost) give_up(std::chrono::seconds(0));
  return lost;
}

void BackgroundSave::give_up(std::chrono::seconds after) noexcept {
  if (archive_) archive_->abandon(after);
  try {
    writer_.wait();
  } catch (const std::exception&) {  // it is not whole
  }
  archive_.reset();
  path_.reset();
}

}  // namespace lockstep
