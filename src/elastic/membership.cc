#include "elastic/membership.h"

#include <chrono>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::elastic {

Membership::Membership(Job job, int row_size, int part) : job_(std::move(job)), row_size_(row_size), part_(part) {
  if (!job_.is_newcomer()) presence_ = show_presence(stores().here(), members().self().name);
}

bool Membership::wait_for_place(std::int64_t training, const std::string& description, Deadline deadline,
                                const std::function<void()>& poll) {
  Candidate candidate(job_.stores(), job_.world(), training, description, part_);
  place_ = candidate.wait(deadline, poll);
  if (place_) presence_ = candidate.presence();
  return place_.has_value();
}

void Membership::take_place() {
  job_ = job_.joined(*place_);
  place_.reset();
}

void Membership::regroup(Change change, double timeout_seconds) {
  change.row_size = row_size_;
  job_ = job_.regroup(change, Deadline::after(std::chrono::duration<double>(timeout_seconds)));
}

OpenTraining::OpenTraining(const Membership& membership, std::int64_t number, std::string description)
    : membership_(membership), number_(number), description_(std::move(description)) {
  watch();
}

// Another member may be the first of its host after each change.
void OpenTraining::watch() {
  const auto& job = membership_.job();
  if (!watch_ && job.world().local_rank == 0)
    watch_.emplace(job.registry(), number_, description_, membership_.row_size());
}

bool OpenTraining::newcomers_wait() {
  watch();
  return watch_ && watch_->any();
}

std::vector<Process> OpenTraining::newcomers() {
  try {
    if (watch_) return watch_->waiting();
  } catch (const DeadlineExceeded&) {
  }
  return {};
}

void OpenTraining::on_change() {
  if (watch_) watch_->forget_invited();
  watch();
}

void OpenTraining::end() {
  watch_.reset();
  if (membership_.job().rank() == 0) Watch::tell_end(membership_.stores(), number_, membership_.members());
}

}  // namespace lockstep::elastic
