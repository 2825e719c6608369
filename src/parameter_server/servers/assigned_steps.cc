// Steps that workers make as the chief assigns them; parameter servers have the variables.
#include <algorithm>
#include <utility>

#include "base/text.h"
#include "checkpoint/state.h"
#include "lockstep/base/error.h"
#include "parameter_server/servers/follow_chief.h"
#include "parameter_server/servers/led_by_chief.h"
#include "parameter_server/servers/server_reduction.h"
#include "strategy/split.h"
#include "train/fit_options.h"
#include "train/model_impl.h"

namespace lockstep::servers {
namespace {

constexpr std::chrono::milliseconds kBetweenLooks(200);

class AssignedSteps final : public train::StepSource {
 public:
  AssignedSteps(ModelImpl& impl, parameter_server::ServerCluster& servers, std::int64_t call, const Dataset& data,
                const FitOptions& options)
      : impl_(impl),
        servers_(servers),
        call_(call),
        data_(data),
        options_(options),
        coordinator_(servers.coordinator()) {
    const auto policy = data.options().auto_shard_policy;
    if (policy == AutoShardPolicy::file || policy == AutoShardPolicy::off) {
      throw InvalidArgument(
          "fit: with parameter servers the chief gives workers batches by their places in the data set, so its "
          "auto_shard_policy must be AutoShardPolicy::automatic or data");
    }
    const auto& client = client_of(*impl.gradients);
    if (servers.claims_first_values(client)) store();
  }

  std::int64_t steps_of_an_epoch() override {
    if (options_.steps_per_epoch == FitOptions::kEndless) return -1;
    return options_.steps_per_epoch > 0 ? options_.steps_per_epoch : std::max<std::int64_t>(-1, data_.cardinality());
  }

  void begin_epoch() override {
    if (!std::exchange(begun_, true)) begin();  // callbacks may have restored a checkpoint
    staleness_ = steps_ = 0;
    set_learning_rate();
    const auto steps = steps_of_an_epoch();
    const auto& progress = impl_.state.progress;
    const auto done = static_cast<std::int64_t>(std::exchange(impl_.state.progress.uncounted, {}).size());
    coordinator_.open(progress.position.epoch, progress.position.index + done,
                      steps < 0 ? -1 : steps - progress.batch - done);
  }

  bool next(const std::function<bool()>& interrupted) override {
    const auto deadline = unwrap(impl_.strategy).deadline();
    while (!coordinator_.step_is_ready(Deadline::after(kBetweenLooks), deadline)) {
      if ((interrupted_ = interrupted())) return false;
    }
    step_ = coordinator_.wait_for_step(deadline);
    interrupted_ = !step_ && interrupted();
    return step_.has_value();
  }

  std::vector<double> sum(std::span<const double> news) override { return {news.begin(), news.end()}; }

  void count(std::span<const double>) override {
    impl_.state.tracker->add_sums(step_->results);
    staleness_ += static_cast<double>(step_->staleness);
    ++steps_;
    impl_.gradients->updater().count_step();
    ++impl_.state.steps;
    ++impl_.state.progress.batch;
    auto& now = impl_.state.progress;
    now.examples = ++now.position.index * batch_size_;
    now.batch_size = batch_size_;
    set_learning_rate();
  }

  void stop() override { coordinator_.stop(); }
  bool was_interrupted() const override { return interrupted_; }

  void require_known_trainable(bool changed) const override {
    if (!changed) return;
    throw InvalidArgument(
        "fit: a callback changed which parameters require gradients. With parameter servers that holds for a whole "
        "fit, as the workers were told when it began: change it before fit, and on all processes");
  }

  // Tells the staleness, where workers do not wait for each other.
  void add_to(Logs& logs) const override {
    if (servers_.mode().parts == 1 && steps_ > 0) logs.set("staleness", staleness_ / steps_);
  }

 private:
  void store() { impl_.gradients->remote()->store(unwrap(impl_.strategy).deadline()); }

  void begin() {
    const auto& client = client_of(*impl_.gradients);
    servers_.require_known(client);
    if (servers_.tell_training(client)) store();  // a server may have been started again before
    batch_size_ = strategy::first_element(data_, impl_.replicas(), impl_.state.progress.position.epoch).size();
    find_position();
    impl_.state.progress.batch_size = batch_size_;
    coordinator_.begin(
        call_, client.model(), servers_.mode(),
        text(train::describe_fit(impl_, data_, options_, impl_.replicas()), "\n", impl_.parameters->describe_frozen()),
        checkpoint::print_state(impl_.state.beside_servers()), impl_.state.progress.uncounted);
  }

  // Finds the position in a checkpoint that was made with batches of another size.
  void find_position() {
    auto& now = impl_.state.progress;
    const bool at_begin = now.position.index == 0 && now.uncounted.empty();
    if (at_begin || now.batch_size == batch_size_) return;
    if (now.batch_size == 0 || now.examples % batch_size_ != 0 || !now.uncounted.empty()) {
      throw InvalidArgument(text("fit: the checkpoint was made after ", now.position.index, " batches of ",
                                 now.batch_size, " examples, and with batches of ", batch_size_,
                                 " parameter servers cannot go on there: take the same batch size, or a checkpoint of ",
                                 "the end of an epoch"));
    }
    now.position.index = now.examples / batch_size_;
    if (options_.steps_per_epoch == 0) now.batch = now.position.index;
  }

  // Sets the rate that a callback has set for the steps that begin from now on.
  void set_learning_rate() { coordinator_.set_learning_rate(impl_.gradients->updater().learning_rate_override()); }

  ModelImpl& impl_;
  parameter_server::ServerCluster& servers_;
  const std::int64_t call_;
  const Dataset& data_;
  const FitOptions& options_;
  parameter_server::Coordinator& coordinator_;
  std::optional<parameter_server::Coordinator::FinishedStep> step_;  // the step that finished last
  double staleness_ = 0, steps_ = 0;                                 // this epoch's, in this process
  bool begun_ = false, interrupted_ = false;
  std::int64_t batch_size_ = 0;  // examples
};

}  // namespace

std::unique_ptr<train::StepSource> assigned_steps(ModelImpl& impl, parameter_server::ServerCluster& servers,
                                                  std::int64_t call, const Dataset& data, const FitOptions& options) {
  return std::make_unique<AssignedSteps>(impl, servers, call, data, options);
}

}  // namespace lockstep::servers
