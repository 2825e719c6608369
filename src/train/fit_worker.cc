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

std::string FitWorker::print_state() {
  Archive archive;
  save_for_newcomer(ReplicatedModule(impl_.parameters), ReplicatedOptimizer(impl_.gradients), archive);
  impl_.save_progress(archive);
  impl_.save_callbacks(archive);
  return checkpoint::print_archive(archive);
}

void FitWorker::take_state(std::string_view printed) {
  const auto archive = parse_state(printed);
  std::vector<std::function<void()>> changes{
      load_of_newcomer(ReplicatedModule(impl_.parameters), ReplicatedOptimizer(impl_.gradients), archive),
      impl_.load_progress(archive)};
  impl_.load_callbacks(archive, changes);
  for (const auto& change : changes) change();
}

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
