// Tests which of the chief's values a worker computes with. Answers of the chief come at a moment that a test chooses.
#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <chrono>
#include <csignal>
#include <future>
#include <span>

#include "base/fresh_folder_testing.h"
#include "checkpoint/safetensors.h"
#include "data/stored_tensor.h"
#include "parameter_server/coordinator.h"
#include "parameter_server/server_cluster.h"
#include "parameter_server/servers/servers.h"
#include "tests/server_job.h"

namespace lockstep {
namespace {

using parameter_server::Assignment;
using parameter_server::ChiefConnection;
using parameter_server::ChiefState;
using parameter_server::ServiceEngine;

// Changes that a test makes to the chief's answers before the worker gets them.
struct Answers {
  std::function<void(ChiefState&)> on_start = [](auto&) {};
  std::function<void(const Assignment&)> on_next = [](auto&) {};
};

class ChangedChief final : public ChiefConnection {
 public:
  ChangedChief(std::shared_ptr<ChiefConnection> chief, const Answers& answers)
      : chief_(std::move(chief)), answers_(answers) {}

  bool has_begun(std::int64_t call, const std::string& name, Deadline deadline) override {
    return chief_->has_begun(call, name, deadline);
  }
  std::optional<std::string> start(std::int64_t call, int worker, const std::string& plan, Deadline deadline) override {
    const auto printed = chief_->start(call, worker, plan, deadline);
    if (!printed || printed->empty()) return printed;
    auto state = ChiefState::parse(*printed);
    answers_.on_start(state);
    return state.print();
  }
  Assignment next(std::int64_t call, int worker, const std::optional<parameter_server::Report>& report,
                  Deadline deadline) override {
    auto assignment = chief_->next(call, worker, report, deadline);
    answers_.on_next(assignment);
    return assignment;
  }
  std::optional<std::string> outcome(std::int64_t call, Deadline deadline) override {
    return chief_->outcome(call, deadline);
  }

 private:
  const std::shared_ptr<ChiefConnection> chief_;
  const Answers& answers_;
};

// gRPC, but for the chief's answers.
class EngineWithAnswers final : public ServiceEngine {
 public:
  explicit EngineWithAnswers(const Answers& answers) : answers_(answers) {}

  std::unique_ptr<parameter_server::Endpoint> serve(const std::string& address, const Access& access,
                                                    const parameter_server::Services& services) const override {
    return grpc_.serve(address, access, services);
  }
  std::shared_ptr<parameter_server::ServerConnection> connect_server(const ModelOnServer& of,
                                                                     parameter_server::FindAddress address,
                                                                     const Access& access) const override {
    return grpc_.connect_server(of, std::move(address), access);
  }
  bool transfer(const ModelOnServer& of, parameter_server::FindAddress address, const Access& access,
                std::int64_t number, parameter_server::ShardStore& to, Deadline deadline) const override {
    return grpc_.transfer(of, std::move(address), access, number, to, deadline);
  }
  std::shared_ptr<ChiefConnection> connect_chief(const parameter_server::Process& self,
                                                 parameter_server::FindAddress address,
                                                 const Access& access) const override {
    return std::make_shared<ChangedChief>(grpc_.connect_chief(self, std::move(address), access), answers_);
  }

 private:
  const ServiceEngine& grpc_ = parameter_server::service_engine();
  const Answers& answers_;
};

Strategy strategy_with(const ServiceEngine& engine, const ParameterServerOptions& options) {
  const auto cluster = std::make_shared<parameter_server::ServerCluster>(
      parameter_server::with_roles(*options.cluster, options.num_ps, options.evaluator),
      parameter_server::ServerClusterOptions{.start_seconds = options.start_timeout_seconds}, engine);
  return Strategy(std::make_shared<StrategyImpl>(
      strategy::StrategySettings{.devices = options.devices,
                                 .threads_per_replica = options.threads_per_replica,
                                 .timeouts = {.step = options.timeout_seconds},
                                 .kind = std::make_shared<servers::Servers>(
                                     cluster, cluster->agree_on_replicas(static_cast<int>(options.devices.size())))}));
}

// Learns the sum of all x times `scale`, which is no variable of the servers.
struct Scaled : torch::nn::Module {
  explicit Scaled(double by)
      : weight(register_parameter("weight", at::zeros({1}, at::kDouble))),
        scale(register_buffer("scale", at::full({1}, by, at::kDouble))),
        frozen(register_parameter("frozen", at::full({1}, by, at::kDouble), /*requires_grad=*/false)) {}
  Tensor forward(const Tensor& x) { return x * (scale + frozen) * weight; }
  Tensor weight, scale, frozen;
};

Model scaled(double by) {
  Model model([by] { return std::make_shared<Scaled>(by); });
  const auto minus = [](const Tensor&, const Tensor& out) { return -out; };
  model.compile({.optimizer = SGD({.learning_rate = 1}), .loss = Loss("minus", minus)});
  return model;
}

Dataset one_to_eight() {
  const auto x = at::arange(1, 9, at::kDouble).view({8, 1});
  return Dataset::from_tensor_slices(x, at::zeros({8, 1}, at::kDouble)).batch(1);
}
constexpr double kSum = 36;

double learned(const Model& model) { return weights_of(model)[0].item<double>(); }

// The worker has asked for a task when the signal comes, and the task is the first one after weights were loaded.
TEST(FollowChief, AWorkerThatIsInterruptedBeforeItHasTheChiefsValuesComputesNothing) {
  const auto other = (fresh_folder("follow_chief", "interrupted") / "other").string();
  scaled(10).save_weights(other);
  std::promise<void> has_come;
  const auto signal_has_come = has_come.get_future().share();
  Answers of_interrupted, of_other;
  of_interrupted.on_next = [&, done = false](const Assignment& next) mutable {
    if (next.kind != Assignment::Kind::task || next.state == 0 || std::exchange(done, true)) return;
    std::raise(SIGTERM);
    has_come.set_value();
  };
  of_other.on_next = [&](const Assignment& next) {  // leaves the other one a task
    if (next.kind == Assignment::Kind::task && next.state != 0) signal_has_come.wait_for(std::chrono::seconds(30));
  };
  expect_no_error(run_processes({.workers = 2}, [&](const ParameterServerOptions& options) {
    const auto& cluster = *options.cluster;
    const bool works = cluster.task_type == "worker", is_interrupted = works && cluster.task_index == 0;
    const EngineWithAnswers engine(is_interrupted ? of_interrupted : of_other);
    const auto strategy = works ? strategy_with(engine, options) : Strategy(ParameterServerStrategy(options));
    const auto scope = strategy.scope();
    auto model = scaled(1);
    const auto load = LambdaCallback({.on_epoch_end = [&](int epoch, const Logs&) {
      if (epoch == 0) model.load_weights(other);
    }});
    const FitOptions fit{.epochs = 2, .verbose = 0, .callbacks = {load}, .handle_signals = is_interrupted};
    if (is_interrupted) {
      EXPECT_THROW(model.fit(one_to_eight(), fit), Interrupted);
      return;
    }
    model.fit(one_to_eight(), fit);
    if (strategy.is_chief()) {
      EXPECT_EQ(learned(model), 20 * kSum);
    }
  }));
}

// The chief is started again after the worker's `start`, and the worker gets its first task from the new one.
TEST(FollowChief, AWorkerTakesTheValuesOfTheChiefThatGivesItsFirstTask) {
  int starts = 0;
  Answers answers;
  answers.on_start = [&](ChiefState& state) {
    if (++starts > 1) return;
    auto archive = checkpoint::parse_archive("a test", std::as_bytes(std::span(state.values)));
    for (const char* const name : {"scale", "frozen"})
      archive.tensors[name] = data::to_stored(at::full({1}, 5.0, at::kDouble));
    state.values = checkpoint::print_archive(archive);
    --state.chief;
  };
  expect_no_error(run_processes({.workers = 1}, [&](const ParameterServerOptions& options) {
    const EngineWithAnswers engine(answers);
    const auto strategy = options.cluster->task_type == "worker" ? strategy_with(engine, options)
                                                                 : Strategy(ParameterServerStrategy(options));
    const auto scope = strategy.scope();
    auto model = scaled(1);
    model.fit(one_to_eight(), {.verbose = 0, .handle_signals = false});
    if (strategy.is_chief()) {
      EXPECT_EQ(learned(model), 2 * kSum);
    }
  }));
  EXPECT_EQ(starts, 2);
}

}  // namespace
}  // namespace lockstep
