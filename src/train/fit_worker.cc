#include "train/fit_worker.h"

#include "checkpoint/safetensors.h"
#include "train/training.h"
#include "train/update_state.h"

namespace lockstep::train {

std::string FitWorker::print_update() {
  return train::print_update(ReplicatedModule(impl_.parameters), ReplicatedOptimizer(impl_.gradients));
}

void FitWorker::take_update(const std::string& printed) {
  train::take_update(ReplicatedModule(impl_.parameters), ReplicatedOptimizer(impl_.gradients), printed);
}

std::string FitWorker::print_part() {
  Archive archive;
  save_for_newcomer(ReplicatedModule(impl_.parameters), ReplicatedOptimizer(impl_.gradients), archive);
  return checkpoint::print_archive(archive);
}

std::string FitWorker::print_state() {
  Archive archive;
  impl_.save_progress(archive);
  impl_.save_callbacks(archive);
  return checkpoint::print_archive(archive);
}

void FitWorker::take_state(std::string_view printed, std::string_view printed_part) {
  auto archive = parse_state(printed), part = parse_state(printed_part);
  archive.tensors.merge(part.tensors);
  archive.entries.merge(part.entries);
  const auto change_values =
      load_of_newcomer(ReplicatedModule(impl_.parameters), ReplicatedOptimizer(impl_.gradients), archive);
  const auto change_progress = impl_.load_progress(archive), change_callbacks = impl_.load_callbacks(archive);
  change_values();
  change_progress();
  change_callbacks();
}

}  // namespace lockstep::train

namespace lockstep {

ModelImpl::Numbers ModelImpl::in_section(const std::string& what, const std::function<Numbers()>& act) {
  if (gradients == nullptr) {
    if (parameters != nullptr) parameters->regroup();
    return act();
  }
  if (training != nullptr) return training->run_or_act(act);
  const auto& all = unwrap(strategy);
  if (!all.workers().is_elastic() || all.workers().completed_sections().is_in_one) return act();
  train::FitWorker worker(*this, what, [] {});
  return train::Training::of(worker)->run_or_act(act);
}

void ModelImpl::check_on_all(const std::string& what, const std::function<void()>& check) {
  if (unwrap(strategy).workers().is_elastic()) return check();  // the others go on without a worker that fails
  in_section(what, [&] {
    collective::check_on_all(topology.peers, topology.all.size() > 1 ? "worker" : "rank", check);
    return Numbers();
  });
}

}  // namespace lockstep
