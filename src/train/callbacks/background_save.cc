#include "train/callbacks/background_save.h"

#include <utility>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

// Returns the result of the chief's says() on all workers.
bool chief_says(ModelImpl& impl, const std::function<bool()>& says) {
  const auto ask = [&] {
    const auto& workers = impl.topology.all;
    ModelImpl::Numbers said{workers.rank() == 0 && says() ? 1.0 : 0.0};
    workers.sum(said);
    return said;
  };
  return impl.in_section("a checkpoint", ask).front() > 0;
}

}  // namespace

void BackgroundSave::wait() {
  if (writing_.valid()) writing_.get();
}

void BackgroundSave::begin(ModelImpl& impl, const train::StateFile& file) {
  give_up(std::chrono::seconds(0));
  was_lost_ = false;
  auto save = train::SharedSave::begin(impl, file);
  archive_ = save.archive;
  path_ = file.path;
  begun_in_ = impl.topology.all.regroups();
  is_written_ = false;
  writing_ =
      std::async(std::launch::async, [this, write = std::move(save.write), file, is_chief = archive_ != nullptr] {
        is_chief ? file.make(write) : write();
        is_written_ = true;
      });
  impl.topology.all.any(false);  // where it returns on one, all have begun
}

void BackgroundSave::finish(const ModelImpl& impl) {
  const auto& workers = impl.topology.all;
  std::string mine;
  if (!archive_) {
    try {
      wait();
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
    // All workers that are left have written their parts.
    if (archive_ && (!problem.empty() || others_left)) archive_->abandon();
    try {
      wait();
    } catch (const IoError&) {
      if (problem.empty() && !others_left) throw;
    }
    if (!problem.empty()) throw IoError(problem);
    lost = was_lost_ || !is_whole();  // was_lost_: where this call is repeated
  });
  was_lost_ = workers.any(lost);
  archive_.reset();
  path_.reset();
}

void BackgroundSave::start(const ModelImpl& impl) {
  seen_ = unwrap(impl.strategy).workers().completed_sections().generation;
}

bool BackgroundSave::was_lost(ModelImpl& impl) {
  return chief_says(impl, [this] { return was_lost_; });
}

bool BackgroundSave::is_lost(ModelImpl& impl) {
  const auto& completed = unwrap(impl.strategy).workers().completed_sections();
  const auto now = completed.generation;  // the same on all, unlike the number of a worker's regroups
  if (seen_ == now) return false;
  const bool lost = chief_says(impl, [this] { return !is_whole(); });
  seen_ = completed.generation;
  if (lost) give_up(std::chrono::seconds(0));
  return lost;
}

void BackgroundSave::give_up(std::chrono::seconds after) noexcept {
  if (archive_) archive_->abandon(after);
  try {
    wait();
  } catch (const std::exception&) {  // the save is not whole
  }
  archive_.reset();
  path_.reset();
}

}  // namespace lockstep
