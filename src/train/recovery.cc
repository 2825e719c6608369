#include "train/recovery.h"

#include <algorithm>
#include <chrono>
#include <sstream>

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/safetensors.h"
#include "lockstep/base/error.h"
#include "strategy/strategy_impl.h"

namespace lockstep::train {

struct Recovery::Report {
  std::int64_t completed = 0, iterations = 0, steps = 0;
  bool updated = false;

  std::string print() const { return text(completed, " ", iterations, " ", steps, " ", updated ? 1 : 0); }
  static Report parse(const std::string& printed) {
    Report report;
    std::istringstream(printed) >> report.completed >> report.iterations >> report.steps >> report.updated;
    return report;
  }
};

void Recovery::run(const std::function<Numbers()>& act, const std::function<void(const Numbers& numbers)>& finish) {
  begin();
  while (true) {
    std::vector<int> lost;
    try {
      auto numbers = act();
      finish(numbers);
      last_ = std::move(numbers);
      break;
    } catch (const std::exception& error) {
      if (!is_loss(error, lost)) throw;
    }
    if (recover(std::move(lost), finish)) break;
  }
  ++completed_;
}

void Recovery::begin() {
  updated = false;
  steps_before_ = impl_.steps;
  iterations_before_ = impl_.gradients->updater().iterations();
}

bool Recovery::goes_on_behind(const std::exception& error, const std::string& what) {
  std::vector<int> lost;
  if (!is_loss(error, lost)) return false;
  log_warning(text(what, " broke off: ", error.what()));
  begin();
  recover(std::move(lost), {});
  return true;
}

// `lost`: the workers that are known to be; others may know more.
bool Recovery::is_loss(const std::exception& error, std::vector<int>& lost) const {
  if (!unwrap(impl_.strategy).is_elastic()) return false;
  if (const auto* const peer = dynamic_cast<const PeerLost*>(&error)) {
    lost = {peer->rank()};
    return true;
  }
  if (const auto* const late = dynamic_cast<const DeadlineExceeded*>(&error)) {
    lost = late->ranks();
    return !lost.empty();
  }
  return dynamic_cast<const Aborted*>(&error) != nullptr;
}

// Until the agreement of those that remain is not disturbed by another loss.
bool Recovery::recover(std::vector<int> lost, const std::function<void(const Numbers&)>& finish) {
  while (true) {
    try {
      return regroup(std::move(lost), finish);
    } catch (const std::exception& error) {
      if (!is_loss(error, lost)) throw;
    }
  }
}

// Whether the section is completed by that.
bool Recovery::regroup(std::vector<int> lost, const std::function<void(const Numbers&)>& finish) {
  const auto begin = std::chrono::steady_clock::now();
  const auto& workers = impl_.workers();
  const int size_before = workers.size(), rank_before = workers.rank();
  unwrap(impl_.strategy).regroup(std::move(lost));
  impl_.gradients->sync().regroup();
  const auto iterations = impl_.gradients->updater().iterations();
  std::vector<Report> reports;
  const Report mine{completed_, iterations, impl_.steps, updated || iterations > iterations_before_};
  for (const auto& printed : workers.all_gather(mine.print())) reports.push_back(Report::parse(printed));
  share_state(reports);
  const auto first = std::max_element(reports.begin(), reports.end(),
                                      [](const auto& a, const auto& b) { return a.completed < b.completed; });
  const auto lacks = [&](const Report& report) { return report.completed < first->completed; };
  const bool is_behind = lacks(mine);
  auto numbers = last_;
  if (std::any_of(reports.begin(), reports.end(), lacks))
    numbers = share(last_, static_cast<int>(first - reports.begin()));
  updated = !is_behind && std::any_of(reports.begin(), reports.end(),
                                      [&](const auto& report) { return !lacks(report) && report.updated; });
  impl_.steps = is_behind ? first->steps : steps_before_ + (updated ? 1 : 0);
  if (is_behind) {
    finish(numbers);
    last_ = numbers;
  }
  impl_.tracker->take_over(workers.rank(), updated);
  if (workers.rank() == 0) {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    log_warning(text("fit goes on with ", workers.size(), " of ", size_before, " workers after ", took.count(),
                     " s, at step ", impl_.steps));
    if (rank_before != 0) on_chief_lost_();
  }
  return is_behind;
}

// Worker `from`'s.
Recovery::Numbers Recovery::share(const Numbers& numbers, int from) const {
  const std::string mine(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(double));
  const auto bytes = impl_.workers().broadcast(mine, from);
  Numbers shared(bytes.size() / sizeof(double));
  std::copy_n(bytes.data(), bytes.size(), reinterpret_cast<char*>(shared.data()));
  return shared;
}

// Those that lack an update get the model's values and the optimizer's state from one that has it.
void Recovery::share_state(const std::vector<Report>& reports) {
  const auto with = std::max_element(reports.begin(), reports.end(),
                                     [](const auto& a, const auto& b) { return a.iterations < b.iterations; });
  const auto lacks = [&](const Report& report) { return report.iterations < with->iterations; };
  if (std::none_of(reports.begin(), reports.end(), lacks)) return;
  const auto model = ReplicatedModule(impl_.parameters).trackable();
  const auto optimizer = ReplicatedOptimizer(impl_.gradients).trackable();
  Archive archive;
  model.save(archive, "model");
  optimizer.save(archive, "optimizer");
  const auto bytes =
      impl_.workers().broadcast(checkpoint::print_archive(archive), static_cast<int>(with - reports.begin()));
  if (!lacks(reports[static_cast<std::size_t>(impl_.workers().rank())])) return;
  const auto received = checkpoint::parse_archive("another worker's state", std::as_bytes(std::span(bytes)));
  const auto change_model = model.load(received, "model"), change_optimizer = optimizer.load(received, "optimizer");
  change_model();
  change_optimizer();
}

}  // namespace lockstep::train
