#include "parallel/step_over_ranks.h"

#include <span>
#include <utility>

#include "base/text.h"
#include "parallel/mesh_backend.h"

namespace lockstep::parallel {
namespace {

const Purpose kExamples("the examples of pipelines that call layers together"),
    kWeight("what a pipeline's batch counts for");

}  // namespace

StepOverRanks::StepOverRanks(Layers layers, const Communicator& pipeline, std::int64_t examples)
    : layers_(std::move(layers)),
      pipeline_(pipeline.with_purpose(kWeight)),
      examples_(examples),
      most_examples_(examples) {
  for (const auto& layer : layers_) {
    if (are_of_one_mesh(layer->group(), pipeline.group())) continue;
    throw InvalidArgument(text("Pipeline: the batch normalization \"", layer->name(), "\" of a stage is over ",
                               layer->group().size(),
                               " ranks (convert_sync_batchnorm) that are not of the pipeline's mesh, so that pipelines "
                               "cannot agree on their microbatches: take both from one DeviceMesh, such as "
                               "mesh[\"data\"].group() and mesh[\"pipeline\"]"));
  }
  auto call = Call::all_reduce(buffer_of(std::span(&most_examples_, 1)), ReduceOp::max);
  call.purpose = kExamples;
  const auto mesh = mesh_of(pipeline);
  mesh.group().run(call, mesh.deadline());
}

StepOverRanks::~StepOverRanks() {
  for (const auto& layer : layers_) layer->set_weight(std::nullopt);
}

void StepOverRanks::set_weight(const std::function<double()>& weight, int last) {
  double given = pipeline_.rank() == last && examples_ > 0 ? weight() : 0;
  pipeline_.sum({&given, 1});
  for (const auto& layer : layers_) layer->set_weight(given);
}

}  // namespace lockstep::parallel
