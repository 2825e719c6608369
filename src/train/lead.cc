#include "train/lead.h"

#include "checkpoint/state.h"
#include "lockstep/base/error.h"
#include "train/model_impl.h"

namespace lockstep::train {

std::shared_ptr<Lead> Lead::of(ModelImpl& impl) {
  if (auto lead = unwrap(impl.strategy).kind().lead(impl)) return lead;
  return std::make_shared<Lead>(impl);
}

std::string Lead::follow_fit(Model& /*model*/, const Dataset& /*data*/, const FitOptions& /*options*/,
                             std::int64_t /*call*/) {
  throw Error("no chief leads this model's calls");
}

bool Lead::needs_each_step() const { return unwrap(impl_.strategy).workers().is_elastic(); }

bool Lead::is_in_fit() const { return impl_.fit.training != nullptr; }

std::unique_ptr<StepSource> Lead::steps(const Dataset& data, const FitOptions& options) const {
  return local_steps(impl_, data, options);
}

double Lead::weight_of_sum(const ReplicaContext& replica) const { return impl_.number_of(replica) == 0 ? 1 : 0; }

void Lead::fetch() const {
  if (impl_.parameters == nullptr) return;
  const auto deadline = unwrap(impl_.strategy).deadline();
  impl_.parameters->fetch(deadline);
  if (impl_.gradients) impl_.gradients->fetch(deadline);
}

void Lead::write(const StateFile& file) const {
  if (file.weights_only && strategy::has_rows_on_servers(impl_.parameters->module(0))) {
    throw InvalidArgument(
        "save_weights: the rows of a ShardedEmbedding are on servers; save_checkpoint saves them, and so do the "
        "callbacks that write full checkpoints");
  }
  write_file(file);
}

void Lead::write_file(const StateFile& file) const {
  const auto archive = checkpoint::archive_of(impl_.state.of_file(file.weights_only));
  impl_.topology.all.run_on_rank_0([&] { file.make([&] { write_archive(file.path, archive); }); });
}

void Lead::load_checkpoint(const std::string& path) const { impl_.state.read_all(path)(); }

}  // namespace lockstep::train
