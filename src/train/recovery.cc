#include "train/recovery.h"

#include <chrono>

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/safetensors.h"
#include "lockstep/base/error.h"
#include "strategy/strategy_impl.h"

namespace lockstep::train {

// What fit trains, as a member of the job.
class Recovery::Worker final : public elastic::Member {
 public:
  Worker(ModelImpl& impl, std::function<void()> on_become_chief)
      : impl_(impl), on_become_chief_(std::move(on_become_chief)) {}

  int rank() const override { return impl_.workers().rank(); }
  int size() const override { return impl_.workers().size(); }
  std::int64_t generation() const override { return strategy().job().world().generation; }
  std::vector<std::string> all_gather(const std::string& mine) override { return impl_.workers().all_gather(mine); }
  std::string broadcast(const std::string& bytes, int root) override { return impl_.workers().broadcast(bytes, root); }

  void regroup(const elastic::Change& change) override {
    began_ = std::chrono::steady_clock::now();
    was_chief_ = strategy().is_chief();
    strategy().regroup(change);
    if (!change.leaves) impl_.gradients->sync().regroup();
  }

  void join(const elastic::Members& members, const std::shared_ptr<void>& presence) {
    began_ = std::chrono::steady_clock::now();
    strategy().join(members, presence);
    impl_.gradients->sync().regroup();
  }

  std::int64_t steps() const override { return impl_.steps; }
  void set_steps(std::int64_t steps) override { impl_.steps = steps; }
  std::int64_t updates() const override { return impl_.gradients->updater().iterations(); }

  std::string print_update() override {
    Archive archive;
    model().save(archive, "model");
    optimizer().save(archive, "optimizer");
    return checkpoint::print_archive(archive);
  }
  void take_update(const std::string& printed) override {
    const auto received = parse(printed);
    const auto change_model = model().load(received, "model"),
               change_optimizer = optimizer().load(received, "optimizer");
    change_model();
    change_optimizer();
  }

  std::string print_all() override { return checkpoint::print_archive(impl_.save_for_newcomer()); }
  void take_all(const std::string& printed) override { impl_.load_as_newcomer(parse(printed)); }

  // What the first one says is the cause of the others.
  void on_loss(const std::exception& error) override {
    if (loss_.empty()) loss_ = error.what();
  }

  void on_regrouped(int size_before, bool updated) override {
    impl_.tracker->take_over(rank(), updated);
    auto loss = std::exchange(loss_, "");
    if (loss.empty() && size() < size_before) loss = "others were told to end, and have left";
    if (rank() != 0) return;
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began_;
    log_warning(text("fit goes on with ", size(), " workers (", size_before, " before) after ", took.count(),
                     " s, at step ", impl_.steps, loss.empty() ? "" : ": " + loss));
    if (!was_chief_) on_become_chief_();
  }

 private:
  StrategyImpl& strategy() const { return unwrap(impl_.strategy); }
  Trackable model() const { return ReplicatedModule(impl_.parameters).trackable(); }
  Trackable optimizer() const { return ReplicatedOptimizer(impl_.gradients).trackable(); }
  static Archive parse(const std::string& printed) {
    return checkpoint::parse_archive("another worker's state", std::as_bytes(std::span(printed)));
  }

  ModelImpl& impl_;
  const std::function<void()> on_become_chief_;
  std::chrono::steady_clock::time_point began_;
  bool was_chief_ = false;
  std::string loss_;
};

Recovery::Recovery(ModelImpl& impl, std::function<void()> on_become_chief)
    : impl_(impl), worker_(std::make_unique<Worker>(impl, std::move(on_become_chief))), sections_(*worker_) {}

Recovery::~Recovery() = default;

void Recovery::end() {
  if (training_ < 0 || !impl_.strategy.is_chief()) return;
  watch_.reset();
  const auto& job = unwrap(impl_.strategy).job();
  elastic::Watch::tell_end(*job.stores(), training_, job.members());
}

void Recovery::run(const std::function<Numbers()>& act, const std::function<void(const Numbers& numbers)>& finish) {
  if (unwrap(impl_.strategy).is_elastic()) return sections_.run(act, finish);
  sections_.updated = false;
  finish(act());
}

bool Recovery::goes_on_behind(const std::exception& error, const std::string& what) {
  const std::string why = error.what();
  if (!unwrap(impl_.strategy).is_elastic() || !sections_.goes_on_behind(error)) return false;
  log_warning(text(what, " broke off: ", why));
  return true;
}

void Recovery::take_part(const std::string& description, const std::function<void()>& poll) {
  auto& strategy = unwrap(impl_.strategy);
  if (!strategy.is_elastic()) return;
  training_ = strategy.next_training();
  description_ = description;
  if (!strategy.is_newcomer()) return;
  const auto& job = strategy.job();
  const auto deadline =
      Deadline::after(std::chrono::duration<double>(strategy.settings().workers->group.timeout_seconds));
  elastic::Candidate candidate(job.stores(), job.world(), training_, description);
  const auto members = candidate.wait(deadline, poll);
  sections_.join([&] { worker_->join(members, candidate.presence()); });
}

bool Recovery::newcomers_wait() {
  const auto& strategy = unwrap(impl_.strategy);
  if (training_ < 0 || strategy.job().world().local_rank != 0) return false;
  if (!watch_) watch_.emplace(strategy.job().registry(), training_, description_);
  return watch_->any();
}

bool Recovery::change(bool leaves) {
  elastic::Change change{.leaves = leaves};
  try {
    if (watch_) change.newcomers = watch_->waiting();
  } catch (const DeadlineExceeded&) {  // the store is slow: they are taken in later
  }
  const bool changed = sections_.change(change);
  if (watch_ && !leaves) watch_->forget_invited();
  return changed;
}

}  // namespace lockstep::train
