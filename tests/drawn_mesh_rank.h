// For tests: one rank of a drawn loop on a mesh.
#pragma once

#include "drawn_mesh_plain.h"
#include "lockstep/collective/group.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/ddp/sync_batch_norm.h"
#include "parallel/divided_parameter.h"

namespace lockstep {

// Trains, step by step, a rank's parts of a net on its parts of batches.
class MeshRank {
 public:
  MeshRank(const MeshLoop& loop, const DeviceMesh& mesh) : loop_(loop), mesh_(mesh) {
    if (loop.has("pipeline")) {
      make_pipeline();
    } else {
      make_net();
    }
    optimizer_ = make_optimizer(loop, parameters());
  }

  // All values that this rank has found, by name.
  Values run() {
    std::optional<ContextParallel> context;
    if (loop_.has("context")) context.emplace(mesh_["context"]);
    for (const auto& step : loop_.steps) {
      if (step.evaluates) evaluate(step.batches[0]);
      optimizer_->zero_grad(step.set_to_none);
      if (step.extra_forward) {
        if (pipeline_) {
          evaluate(step.batches[0]);
        } else {
          note_output(call(part_of(step.batches[0]).x));
        }
      }
      accumulate(step);
      average(step);
      clip();
      optimizer_->step();
    }
    evaluate(loop_.steps[0].batches[0]);
    add_weights();
    return std::move(found_);
  }

  // The results of a plain loop, as this rank would have them.
  Values expected(const Plain& plain) const {
    Values values;
    std::size_t i = 0;
    const auto add_forward = [&](const MeshBatch& batch, bool has_loss, bool has_output) {
      const auto part = part_of(batch);
      const auto output = part_of(plain.outputs[i], batch, loop_.net.tokens);
      if (has_output && !loop_.plan.divided_logits) values[text("output ", i)] = output.to(at::kDouble);
      if (has_loss && loop_.balance == 0 && !loop_.in_16_bits())
        values[text("loss ", i)] = sum_of_losses(output, part.y) / divisor(batch, part) + plain.penalties[i];
      ++i;
    };
    for (const auto& step : loop_.steps) {
      const bool whole = !pipeline_;
      if (step.evaluates) add_forward(step.batches[0], false, true);
      if (step.extra_forward) add_forward(step.batches[0], false, true);
      for (const auto& batch : step.batches) add_forward(batch, true, whole);
    }
    add_forward(loop_.steps[0].batches[0], false, true);
    for (const auto& [name, found] : found_names_) {
      const auto tied = name.ends_with(".head.weight") && loop_.net.tie != Tie::none && loop_.stages() > 1;
      const auto& whole = plain.weights.at(tied ? "0.token.weight" : name);
      values[name] = found ? found->part_of(whole) : whole;
    }
    return values;
  }

 private:
  using Division = std::shared_ptr<const parallel::DividedParameter>;

  // --- making

  void divide(MeshNet& net, int begin, int end) {
    if (loop_.has("tensor")) {
      auto plan = loop_.plan.plan;
      std::erase_if(plan, [&](const auto& entry) {
        const auto layer = std::atoi(entry.first.c_str());
        return layer < begin || layer >= end;
      });
      parallelize_module(net, mesh_["tensor"], plan);
    }
    if (loop_.has("context") && loop_.net.places && begin == 0)
      parallelize_module(net, mesh_["context"], {{"0.place.weight", Shard{0}}});
  }

  const Communicator& experts() {
    static const Communicator alone;
    return loop_.has("expert") ? mesh_["expert"] : alone;
  }

  void make_net() {
    net_ = MeshNet(loop_.net, 0, loop_.net.count(), &experts());
    divide(net_, 0, loop_.net.count());
    if (loop_.has("data") && !loop_.has("shard")) {
      if (loop_.has_norm()) convert_sync_batchnorm(*net_, mesh_["data"].group());
    }
    if (loop_.ddp) ddp_.emplace(net_.ptr(), mesh_["data"]);
    if (loop_.has("shard")) {
      auto options = loop_.sharding;
      if (loop_.has("data")) options.replicas = mesh_["data"];
      sharded_.emplace(fully_shard(net_, mesh_["shard"], options));
    }
  }

  void make_pipeline() {
    const int count = loop_.net.count(), stages = loop_.stages();
    std::vector<PipelineStage> all;
    for (int i = 0; i < stages; ++i) {
      const int begin = i * count / stages, end = (i + 1) * count / stages;
      all.emplace_back([this, begin, end] {
        MeshNet net(loop_.net, begin, end, &experts());
        divide(net, begin, end);
        if (loop_.has("data") && loop_.has_norm()) convert_sync_batchnorm(*net, mesh_["data"].group());
        return net;
      });
    }
    PipelineOptions options{.schedule = loop_.schedule, .microbatches = loop_.microbatches};
    if (loop_.net.tie != Tie::none && stages > 1)
      options.tied = {{{0, "0.token.weight"}, {stages - 1, text(count - 1, ".head.weight")}}};
    pipeline_.emplace(all, mesh_["pipeline"], options);
    if (!loop_.has("shard")) return;
    auto sharding = loop_.sharding;
    sharding.units.clear();
    if (loop_.has("data")) sharding.replicas = mesh_["data"];
    stage_shards_.emplace(mesh_["shard"], sharding);
    for (const auto& [stage, module] : pipeline_->modules()) stage_shards_->add(*module, text("stage", stage));
  }

  FullyShardedParameters* shards() { return stage_shards_ ? &*stage_shards_ : sharded_ ? &*sharded_ : nullptr; }

  std::vector<at::Tensor> parameters() {
    if (shards() != nullptr) return shards()->parameters();
    return trained_of(pipeline_ ? pipeline_->parameters() : net_->parameters());
  }

  // --- parts of batches

  int part() const {
    int number = 0;
    for (const char* const axis : {"data", "shard", "expert"}) {
      if (loop_.has(axis)) number = number * loop_.size(axis) + mesh_.coordinate(axis);
    }
    return number;
  }
  std::int64_t examples(const MeshBatch& batch, int of) const {
    return batch.begins[static_cast<std::size_t>(of) + 1] - batch.begins[static_cast<std::size_t>(of)];
  }
  at::Tensor part_of(const at::Tensor& whole, const MeshBatch& batch, bool of_positions) const {
    auto x = whole.narrow(0, batch.begins[static_cast<std::size_t>(part())], examples(batch, part()));
    if (of_positions && loop_.has("context"))
      x = x.chunk(loop_.size("context"), 1)[static_cast<std::size_t>(mesh_.coordinate("context"))];
    return x;
  }
  DrawnData part_of(const MeshBatch& batch) const {
    const auto data = data_of(loop_, batch);
    return {part_of(data.x, batch, true), part_of(data.y, batch, loop_.net.tokens)};
  }
  double divisor(const MeshBatch& batch, const DrawnData& part) const {
    if (!loop_.scaled) return static_cast<double>(std::max<std::int64_t>(1, part.y.numel()));
    const auto labels = batch.examples() * (loop_.net.tokens ? loop_.net.positions : 1);
    return static_cast<double>(labels) / (loop_.parts() * loop_.at_least_1("context"));
  }

  // --- steps

  at::Tensor call(const at::Tensor& x) { return ddp_ ? (*ddp_)(x) : sharded_ ? (*sharded_)(x) : net_(x); }

  void note_output(const at::Tensor& y) {
    if (!loop_.plan.divided_logits) found_[text("output ", forwards_)] = y.detach().to(at::kDouble);
    ++forwards_;
  }

  void evaluate(const MeshBatch& batch) {
    const at::NoGradGuard no_grad;
    const auto x = part_of(batch).x;
    if (stage_shards_) stage_shards_->release();
    if (pipeline_) {
      pipeline_->eval();
      note_output(pipeline_->forward(x));
      pipeline_->train();
      return;
    }
    net_->eval();
    note_output(call(x));
    net_->train();
  }

  at::Tensor sum_of(const at::Tensor& logits, const at::Tensor& y) const {
    if (!loop_.plan.divided_logits) return sum_of_losses(logits, y);
    return vocabulary_parallel_cross_entropy(logits.flatten(0, -2), y.flatten(), mesh_["tensor"]).sum();
  }

  at::Tensor loss_of(const MeshBatch& batch) {
    const auto part = part_of(batch);
    const auto y = call(part.x);
    note_output(y);
    auto loss = sum_of(y, part.y) / divisor(batch, part);
    if (loop_.penalty > 0) loss = with_penalty(loss, penalty_of(loop_, *net_));
    note_loss(loss.item<double>());
    if (loop_.balance == 0) return loss;
    const auto share =
        static_cast<double>(examples(batch, this->part()) * loop_.parts()) / static_cast<double>(batch.examples());
    return loss + (loop_.scaled ? share : 1.0) * loop_.balance * net_->balance();
  }

  void note_loss(double loss) {
    if (loop_.balance == 0 && !loop_.in_16_bits())
      found_[text("loss ", forwards_ - 1)] = at::scalar_tensor(loss, at::kDouble);
  }

  void step_pipeline(const MeshBatch& batch) {
    const auto part = part_of(batch);
    ++forwards_;
    if (stage_shards_) stage_shards_->release();
    const auto divisor_of_all = divisor(batch, part);
    note_loss(pipeline_->step(
        part.x, part.y, [&](const at::Tensor& y, const at::Tensor& labels) { return sum_of(y, labels); },
        [&](const at::Tensor&) { return divisor_of_all; }));
  }

  void accumulate(const MeshStep& step) {
    if (pipeline_) {
      for (const auto& batch : step.batches) step_pipeline(batch);
      return;
    }
    std::vector<at::Tensor> losses;
    for (const auto& batch : step.batches) {
      losses.push_back(loss_of(batch));
      if (!step.both_forwards_first) losses.back().backward();
    }
    if (!step.both_forwards_first) return;
    losses[step.second_backward_first ? 1 : 0].backward();
    losses[step.second_backward_first ? 0 : 1].backward();
  }

  void average(const MeshStep& step) {
    const auto trained = parameters();
    if (loop_.has("context")) average_gradients(trained, mesh_["context"]);
    const auto average_over = [&](const char* axis, double count) {
      if (loop_.scaled) return average_gradients(trained, mesh_[axis]);
      average_gradients(trained, mesh_[axis], count);
    };
    const auto& batch = step.batches[0];
    double count = static_cast<double>(examples(batch, part()));
    if (loop_.has("expert")) {
      average_over("expert", count);
      count = 0;
      const int of_experts = loop_.size("expert"), first = part() / of_experts * of_experts;
      for (int i = 0; i < of_experts; ++i) count += static_cast<double>(examples(batch, first + i));
    }
    if (loop_.has("data") && !loop_.ddp && !loop_.has("shard")) average_over("data", count);
  }

  void clip() {
    if (loop_.max_norm == 0) return;
    const auto stages = loop_.has("pipeline") ? mesh_["pipeline"] : Communicator();
    if (shards() != nullptr) {
      shards()->clip_grad_norm(loop_.max_norm, stages);
    } else {
      clip_grad_norm(parameters(), loop_.max_norm, stages);
    }
  }

  // All names of each parameter: layers may be registered twice, and weights tied.
  void add_weights() {
    std::map<std::string, Division> divisions;
    std::map<const at::TensorImpl*, std::vector<std::string>> names;
    const auto add_module = [&](const torch::nn::Module& module) {
      for (const auto& each : module.named_parameters()) {
        divisions[each.key()] = parallel::division_of(each.value());
        names[each.value().unsafeGetTensorImpl()].push_back(each.key());
        if (shards() == nullptr) found_[each.key()] = full_tensor(each.value()).to(at::kDouble);
      }
      for (const auto& each : module.named_buffers())
        found_[each.key()] = each.value().to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
    };
    if (pipeline_) {
      for (const auto& [stage, module] : pipeline_->modules()) add_module(*module);
    } else {
      add_module(*net_);
    }
    const auto gathered = shards() == nullptr ? std::map<std::string, Tensor>() : shards()->gather();
    for (const auto& [name, value] : gathered) {
      const auto plain = stage_shards_ ? name.substr(name.find('.') + 1) : name;
      for (const auto& [parameter, all] : names) {
        if (std::find(all.begin(), all.end(), plain) == all.end()) continue;
        for (const auto& each : all) {
          found_[each] = value.to(at::kDouble);
          found_names_[each] = divisions.at(each);
        }
      }
    }
    for (const auto& [name, value] : found_) {
      if (!name.starts_with("output ") && !name.starts_with("loss ")) found_names_.emplace(name, nullptr);
    }
    mesh_.ranks().check_all_agree("ends of a drawn program", "");  // a rank hears of what another one threw
  }

  const MeshLoop& loop_;
  const DeviceMesh mesh_;
  MeshNet net_ = nullptr;
  std::optional<DistributedDataParallel<MeshNetImpl>> ddp_;
  std::optional<FullySharded<MeshNetImpl>> sharded_;
  std::optional<Pipeline> pipeline_;
  std::optional<FullyShardedParameters> stage_shards_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  int forwards_ = 0;
  Values found_;
  std::map<std::string, Division> found_names_;  // of the weights, and how found ones are divided
};

}  // namespace lockstep
