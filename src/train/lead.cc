#include "train/lead.h"

#include "checkpoint/sharded_archive.h"
#include "train/model_impl.h"

namespace lockstep::train {

std::shared_ptr<Lead> Lead::of(ModelImpl& impl) {
  if (auto lead = unwrap(impl.strategy).kind().lead(impl)) return lead;
  return std::make_shared<Lead>(impl);
}

std::string Lead::follow_fit(Model& /*model*/, const Dataset& /*data*/, const FitOptions& /*options*/,
                             std::int64_t /*call*/) const {
  return {};
}

bool Lead::needs_each_step() const { return unwrap(impl_.strategy).workers().is_elastic(); }

bool Lead::is_in_fit() const { return impl_.fitting; }

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

void Lead::write_weights(const std::string& path) const {
  const auto archive = impl_.save_weights();
  impl_.topology.all.run_on_rank_0([&] { write_archive(path, archive); });
}

void Lead::write_checkpoint(const std::string& path) const {
  const auto archive = impl_.save_state();
  impl_.topology.all.run_on_rank_0([&] {
    write_archive(path, archive);
    checkpoint::remove_rows(path);  // of a checkpoint that was made with parameter servers
  });
}

void Lead::load_checkpoint(const std::string& path) const { impl_.load_state(impl_.read_for_all(path)); }

}  // namespace lockstep::train
