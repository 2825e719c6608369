#include "train/update_state.h"

#include <span>

#include "checkpoint/safetensors.h"

namespace lockstep::train {

std::string print_update(const ReplicatedModule& module, const ReplicatedOptimizer& optimizer) {
  Archive archive;
  module.trackable().save(archive, "model");
  optimizer.trackable().save(archive, "optimizer");
  return checkpoint::print_archive(archive);
}

void take_update(const ReplicatedModule& module, const ReplicatedOptimizer& optimizer, const std::string& printed) {
  const auto received = parse_state(printed);
  const auto change_module = module.trackable().load(received, "model"),
             change_optimizer = optimizer.trackable().load(received, "optimizer");
  change_module();
  change_optimizer();
}

Archive parse_state(std::string_view printed) {
  return checkpoint::parse_archive("another worker's state", std::as_bytes(std::span(printed)));
}

}  // namespace lockstep::train
