#include "parameter_server/servers/follow_chief.h"

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/state.h"
#include "lockstep/base/error.h"
#include "parameter_server/coordinator.h"
#include "parameter_server/servers/server_reduction.h"
#include "parameter_server/servers/servers.h"
#include "strategy/split.h"
#include "train/fit_options.h"
#include "train/model_impl.h"
#include "train/signal_guard.h"

namespace lockstep::servers {
namespace {

using parameter_server::Assignment;
using parameter_server::ChiefState;
using parameter_server::Report;

// The batches of a data set by their places. A worker that computes several parts of a step reads its batch once.
class Batches {
 public:
  explicit Batches(DistributedDataset data) : data_(std::move(data)) {}

  // Returns each replica's part of part `part` of `parts` of a batch; none after the last. Cheap where places ascend.
  std::optional<PerReplica<internal::Part>> at(Position position, int part, int parts) {
    const bool same_epoch = iterator_ && iterator_->position().epoch == position.epoch;
    if (same_epoch && iterator_->position().index == position.index + 1) {
      if (auto read = iterator_->parts_of_last(part, parts)) return read;
    }
    if (!same_epoch || iterator_->position().index > position.index) iterator_.emplace(data_.iterate(position));
    while (iterator_->position().index < position.index) {
      if (!iterator_->skip()) return std::nullopt;
    }
    return iterator_->next_parts_of(part, parts);
  }

 private:
  const DistributedDataset data_;
  std::optional<DistributedIterator> iterator_;
};

class Worker {
 public:
  Worker(Model& model, const Dataset& data, const FitOptions& options, std::int64_t call,
         const train::SignalGuard& signals)
      : model_(model),
        impl_(unwrap(model)),
        data_(data),
        options_(options),
        servers_(servers_of(unwrap(impl_.strategy)).cluster()),
        batches_(strategy::distribute_ahead(data, unwrap(impl_.strategy).local_replicas())),
        call_(call),
        signals_(signals) {}

  template <class Ask>
  auto ask(const Ask& of_chief, bool is_short = true) {
    return servers_.ask_chief(
        of_chief, [this] { return signals_.received() != 0; }, is_short);
  }

  void run() {
    impl_.gradients->prepare();
    if (!start()) return;
    model_.module().train();
    std::optional<ChangedBuffers> buffers(*impl_.parameters);
    std::optional<Report> report;
    while (true) {
      const int signal = signals_.received();
      if (signal != 0) {
        if (!report) throw Interrupted(signal);
        report->leaves = true;
      }
      const auto next = ask(
          [&](auto& chief, Deadline deadline) { return chief.next(call_, servers_.roles().index, report, deadline); });
      if (signal != 0) throw Interrupted(signal);
      report.reset();
      if (next.kind == Assignment::Kind::over) return;
      if (next.kind == Assignment::Kind::task) {
        // A callback has loaded weights, or the chief was started again.
        if (next.state != changes_ || next.chief != chief_) {
          if (!start()) return;
          buffers.emplace(*impl_.parameters);
        }
        if (next.chief != chief_) continue;  // the chief after the one that gave the task does not know of it
        report = compute(next);
      }
      if (!report) continue;
      report->state = changes_;
      report->chief = chief_;
      report->buffers = buffers->take();
    }
  }

 private:
  // Loads the chief's values; false where the fit has ended. Throws Interrupted where a signal came before that.
  bool start() {
    const auto plan = text(train::describe_fit(impl_, data_, options_, unwrap(impl_.strategy).local_replicas()), "\n",
                           impl_.parameters->describe_frozen());
    while (true) {
      if (const int signal = signals_.received(); signal != 0) throw Interrupted(signal);
      const auto printed = ask(
          [&](auto& chief, Deadline deadline) { return chief.start(call_, servers_.roles().index, plan, deadline); },
          /*is_short=*/false);
      if (!printed) continue;
      if (printed->empty()) return false;
      const auto state = ChiefState::parse(*printed);
      checkpoint::parse_state("the chief's model", state.values, impl_.state.beside_servers())();
      chief_ = state.chief;
      changes_ = state.changes;
      return true;
    }
  }

  Report compute(const Assignment& next) {
    const auto parts = servers_.mode().parts;
    auto batch = batches_.at({next.epoch, next.index}, next.task.part, parts);
    if (!batch) return {.kind = Report::Kind::no_batch, .task = next.task};
    impl_.state.steps = next.task.step;
    impl_.part_of_step = next.task.part;
    impl_.gradients->remote()->fetch_changed(unwrap(impl_.strategy).deadline());
    client_of(*impl_.gradients).begin(next);
    impl_.state.tracker->reset();
    try {
      std::vector<PerReplica<internal::Part>> one{*std::move(batch)};
      const auto results = impl_.execution->train(one, *impl_.state.tracker)[0];
      return {.kind = Report::Kind::finished, .task = next.task, .results = impl_.state.tracker->sums_of(results)};
    } catch (const parameter_server::IncompleteUpdate& error) {
      return {.kind = Report::Kind::incomplete, .task = next.task, .error = error.what()};
    }
  }

  Model& model_;
  ModelImpl& impl_;
  const Dataset data_;
  const FitOptions& options_;
  parameter_server::ServerCluster& servers_;
  Batches batches_;
  const std::int64_t call_;
  const train::SignalGuard& signals_;
  std::int64_t chief_ = 0, changes_ = 0;  // ChiefState's, of the values that this process has
};

// Tells the chief why this worker fails: the chief's fit fails with that.
void tell_chief(parameter_server::ServerCluster& servers, std::int64_t call, const std::string& what) {
  const Report report{.kind = Report::Kind::failed, .task = {}, .error = what};
  const auto deadline = Deadline::after(std::chrono::seconds(10));
  const auto late = [&] { return deadline.passed(); };
  const auto tell = [&](auto& chief, Deadline by) { return chief.next(call, servers.roles().index, report, by); };
  try {
    while (!late() && servers.ask_chief(tell, late).kind != Assignment::Kind::over) {
    }
  } catch (const Error&) {  // the chief is gone
  }
}

}  // namespace

std::string follow_chief(Model& model, const Dataset& data, const FitOptions& options, std::int64_t call,
                         std::int64_t& evaluated_step) {
  auto& impl = unwrap(model);
  auto& servers = servers_of(unwrap(impl.strategy)).cluster();
  const bool works = servers.roles().mine == parameter_server::Role::worker;
  const train::SignalGuard signals(options.handle_signals);
  const auto interrupted = [&] { return signals.received() != 0; };
  try {
    const auto kept = train::weighed(impl, data, options).keeping_first();
    impl.build_for(kept, "fit");
    impl.follow_requires_grad();
    impl.require_trainable();
    if (works) Worker(model, kept, options, call, signals).run();
    if (servers.roles().mine == parameter_server::Role::evaluator)
      follow_checkpoints(model, options, call, evaluated_step, signals);
  } catch (const Interrupted&) {
    throw;
  } catch (const std::exception& error) {
    const bool chief_is_gone = dynamic_cast<const DeadlineExceeded*>(&error) != nullptr;
    if (interrupted() && chief_is_gone) throw Interrupted(signals.received());
    if (works) tell_chief(servers, call, error.what());
    throw;
  }
  try {
    return servers.outcome(call, interrupted);
  } catch (const Error&) {
    if (!interrupted()) throw;
    throw Interrupted(signals.received());
  }
}

}  // namespace lockstep::servers
