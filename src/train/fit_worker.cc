#include "train/fit_worker.h"

#include "checkpoint/safetensors.h"
#include "train/update_state.h"

namespace lockstep::train {

std::string FitWorker::print_update() {
  return train::print_update(ReplicatedModule(impl_.parameters), ReplicatedOptimizer(impl_.gradients));
}

void FitWorker::take_update(const std::string& printed) {
  train::take_update(ReplicatedModule(impl_.parameters), ReplicatedOptimizer(impl_.gradients), printed);
}

std::string FitWorker::print_state() { return checkpoint::print_archive(impl_.save_for_newcomer()); }

void FitWorker::take_state(std::string_view printed) { impl_.load_as_newcomer(parse_state(printed)); }

void go_on_in(ModelImpl& impl, const std::string& what, const std::function<void()>& act) {
  auto& strategy = unwrap(impl.strategy);
  const bool is_in_section = impl.fitting || strategy.completed_sections().is_in_one;
  if (is_in_section || impl.gradients == nullptr || !strategy.is_elastic()) return act();
  FitWorker worker(impl, what, [] {});
  Recovery recovery(worker);
  const auto all = [&] {
    act();
    impl.workers().any(false);  // where it returns on one, all have the outcome
    return Recovery::Numbers();
  };
  recovery.run(all, [](const auto&) {});
}

}  // namespace lockstep::train
