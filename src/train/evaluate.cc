#include "train/evaluate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <ios>
#include <optional>
#include <span>
#include <sstream>
#include <tuple>
#include <vector>

#include "base/hash.h"
#include "base/text.h"
#include "collective/refused_by_all.h"
#include "lockstep/base/error.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "ops/tensors.h"
#include "strategy/split.h"
#include "strategy/strategy_impl.h"
#include "train/callbacks/progress_bar.h"
#include "train/execution.h"
#include "train/model_impl.h"

namespace lockstep::train {

namespace {

// A name's row: the name, a tab, and its values in C's hexadecimal notation, which is exact.
using Row = std::pair<std::string, std::vector<double>>;

std::string print_rows(const std::vector<Row>& rows) {
  std::ostringstream out;
  out << std::hexfloat;
  for (const auto& [name, values] : rows) {
    out << name << '\t';
    for (const double value : values) out << ' ' << value;
    out << '\n';
  }
  return out.str();
}

std::vector<Row> parse_rows(const std::string& printed) {
  std::vector<Row> rows;
  std::istringstream lines(printed);
  for (std::string line; std::getline(lines, line);) {
    const auto tab = line.find('\t');
    if (tab == std::string::npos) throw Error(text("the chief's result cannot be read: ", line));
    auto& row = rows.emplace_back(line.substr(0, tab), std::vector<double>());
    std::istringstream words(line.substr(tab + 1));
    for (std::string word; words >> word;) row.second.push_back(std::strtod(word.c_str(), nullptr));
  }
  return rows;
}

constexpr const char* kEpochs = "";  // no log has this name

}  // namespace

std::string print(const Logs& logs) {
  std::vector<Row> rows;
  for (const auto& [name, value] : logs) rows.push_back({name, {value}});
  return print_rows(rows);
}

std::string print(const History& history) {
  std::vector<Row> rows{{kEpochs, {history.epoch.begin(), history.epoch.end()}}};
  rows.insert(rows.end(), history.history.begin(), history.history.end());
  return print_rows(rows);
}

template <>
Logs parse<Logs>(const std::string& text) {
  Logs logs;
  for (const auto& [name, values] : parse_rows(text)) logs.set(name, values.at(0));
  return logs;
}

template <>
History parse<History>(const std::string& text) {
  History history;
  for (const auto& [name, values] : parse_rows(text)) {
    if (name != kEpochs) history.history[name] = values;
    if (name != kEpochs) continue;
    for (const double epoch : values) history.epoch.push_back(static_cast<int>(epoch));
  }
  return history;
}

}  // namespace lockstep::train

namespace lockstep {

// --- evaluate and predict: forward alone, over the same replicas, each example once.

namespace {

// Puts the modules into evaluation mode, with the means of the replicas' buffers; the destructor restores their mode
// and their own buffers.
class EvaluationMode {
 public:
  explicit EvaluationMode(const ModelImpl& impl)
      : module_(impl.parameters), was_training_(unwrap(module_).module(0).is_training()) {
    auto& parameters = unwrap(module_);
    for (int replica = 0; replica < parameters.replicas(); ++replica) {
      auto& own = own_buffers_.emplace_back();
      for (std::size_t i = 0; i < parameters.buffer_names().size(); ++i)
        own.push_back(parameters.buffer(replica, i).clone());
    }
    const auto averages = parameters.average_buffers();
    for (std::size_t i = 0; i < averages.size(); ++i) parameters.assign_buffer(i, averages[i]);
    module_.eval();
  }
  ~EvaluationMode() {
    module_.train(was_training_);
    for (std::size_t replica = 0; replica < own_buffers_.size(); ++replica) {
      const auto& own = own_buffers_[replica];
      for (std::size_t i = 0; i < own.size(); ++i)
        unwrap(module_).assign_buffer_of(static_cast<int>(replica), i, own[i]);
    }
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  ReplicatedModule module_;
  bool was_training_;
  std::vector<std::vector<Tensor>> own_buffers_;  // [replica][buffer]
};

// The global batches of a data set, at most `steps` of them if that is above 0. Compares them where workers must read
// the same data.
class Batches {
 public:
  // Reads the first batch. Collective: where a worker has no batch, all throw.
  Batches(const ModelImpl& impl, const char* caller, const Dataset& data, std::int64_t steps)
      : impl_(impl),
        caller_(caller),
        steps_(steps),
        options_(text("steps ", steps, "\nauto_shard_policy ", static_cast<int>(data.options().auto_shard_policy),
                      "\nbatches in the data set ", data.cardinality(), "\n")),
        hash_of_options_(hash_of(options_)) {
    const auto& strategy = unwrap(impl.strategy);
    strategy.workers().check_on_all([&] {
      iterator_.emplace(strategy::distribute_ahead(data, strategy.local_replicas()).iterate());
      if (iterator_->is_sharded()) return;  // then all workers read at once
      next_ = iterator_->next_parts();
      if (!next_) throw InvalidArgument(kEmpty);
    });
    if (!next_) next_ = iterator_->next_parts();
    if (!next_) throw collective::RefusedByAll(impl.topology.all, kEmpty);
  }

  // Calls visit(batch) for each batch, and returns how many there were. After each batch it calls finish(numbers),
  // which returns their sums over the workers: so the comparison of batches may go with other sums.
  template <class Visit, class Finish>
  std::int64_t for_each(const Visit& visit, const Finish& finish) {
    const bool compares = impl_.topology.all.size() > 1 && !iterator_->is_sharded();
    std::int64_t done = 0;
    while (next_) {
      const auto hash = compares ? iterator_->element_hash() : 0;
      visit(*next_);
      ++done;
      next_ = steps_ == 0 || done < steps_ ? iterator_->next_parts() : std::nullopt;
      if (compares) {
        const auto numbers = numbers_of(hash);
        check_same(finish(std::span<const double>(numbers)), done, hash);
      } else {
        finish(std::span<const double>());
      }
    }
    return done;
  }

 private:
  static constexpr const char* kEmpty = "the data set is empty";

  // Returns the numbers of a batch, which is hashed before the next one is read: two whole numbers of 16 bits, and the
  // sum of their squares. Sums over the workers are exact, and so are their squares for a thousand workers.
  std::array<double, 3> numbers_of(std::uint64_t hash) const {
    constexpr std::uint64_t kBits = (1U << 16) - 1;
    const auto all = mix(hash, next_ ? 0 : 1, hash_of_options_);
    const auto low = static_cast<double>(all & kBits), high = static_cast<double>(all >> 16 & kBits);
    return {low, high, low * low + high * high};
  }

  // `sums`: the workers' sums of numbers_of. The batches are equal where the mean of the numbers' squares is the square
  // of their mean. Where batches differ, this call is collective: it throws InvalidArgument on all workers, naming one
  // and what differs.
  void check_same(std::span<const double> sums, std::int64_t batch, std::uint64_t hash) const {
    const auto& workers = impl_.topology.all;
    if (sums[0] * sums[0] + sums[1] * sums[1] == sums[2] * workers.size()) return;
    workers.check_all_agree("data", text(options_, caller_, ": a batch with the hash ", hash, " as batch ", batch,
                                         next_ ? ", and more after it" : ", the last one"));
  }

  const ModelImpl& impl_;
  const char* const caller_;
  const std::int64_t steps_;
  const std::string options_;
  const std::uint64_t hash_of_options_;
  std::optional<DistributedIterator> iterator_;
  std::optional<PerReplica<internal::Part>> next_;
};

// Throws where this worker cannot evaluate. Not collective.
void require_evaluable(const ModelImpl& impl, const Dataset& data, std::int64_t steps) {
  if (impl.topology.is_newcomer() && impl.topology.is_split) {
    throw ClusterError(
        "evaluate, predict: this process comes to a job that runs, and has a part of a model until fit, in which the "
        "others take it in; call them after fit, or not where LOCKSTEP_JOIN is set");
  }
  require(steps >= 0, "steps", steps, "0 (all) or more");
  if (steps == 0 && data.cardinality() == Dataset::kInfinite)
    throw InvalidArgument("the data set is endless; set steps, or take() a part of it");
  impl.parameters->require_equal_between_processes();
  const auto difference = impl.parameters->difference_between_copies();
  if (!difference.empty()) throw InvalidArgument(difference);
}

// Calls act(batches), collective over the workers. Where one fails, the others are told.
template <class Act>
void with_batches(const ModelImpl& impl, const char* caller, const Dataset& data, std::int64_t steps, const Act& act) {
  unwrap(impl.strategy).workers().abort_on_error([&] {
    unwrap(impl.strategy).workers().check_on_all([&] { require_evaluable(impl, data, steps); });
    const EvaluationMode evaluating(impl);
    const at::NoGradGuard no_grad;
    Batches batches(impl, caller, data, steps);  // a data set may call the model
    act(batches);
  });
}

// Returns the workers' outputs for a batch, in order; undefined where no worker has any.
Tensor rows_of_all(const Communicator& workers, const std::vector<Tensor>& here) {
  if (workers.size() == 1) return here.empty() ? Tensor() : at::cat(here);
  const auto kinds = workers.all_gather(
      here.empty() ? "" : text(static_cast<int>(here[0].scalar_type()), " ", join(here[0].sizes().slice(1), " ")));
  const auto kind = std::find_if(kinds.begin(), kinds.end(), [](const auto& theirs) { return !theirs.empty(); });
  if (kind == kinds.end()) return {};
  std::istringstream words(*kind);
  int dtype = 0;
  words >> dtype;
  std::vector<std::int64_t> shape{0};
  for (std::int64_t size = 0; words >> size;) shape.push_back(size);
  const auto mine = here.empty() ? at::empty(shape, static_cast<at::ScalarType>(dtype)) : at::cat(here);
  return all_gather(workers.group(), mine, workers.deadline());
}

// Joins the batches' outputs. Their lengths may differ, as the user must know.
Tensor one_after_the_other(const std::vector<Tensor>& batches) {
  std::vector<Tensor> some;
  for (const auto& batch : batches) {
    if (batch.defined()) some.push_back(batch);
  }
  if (some.empty()) throw InvalidArgument("predict: the data set has no examples");
  for (const auto& batch : some) {
    if (batch.sizes().slice(1) == some[0].sizes().slice(1)) continue;
    throw InvalidArgument(text("predict: a batch has outputs of shape ", batch.sizes(), ", and the first one of ",
                               some[0].sizes(), "; they cannot be joined: pad the examples, or predict each length"));
  }
  return at::cat(some).contiguous();  // convolutions on CPUs leave channels last
}

// Returns the outputs of the replicas that have some, on the host.
std::vector<Tensor> on_host(const std::vector<Tensor>& parts) {
  auto here = ops::defined_of(parts);
  for (auto& part : here) part = part.cpu();
  return here;
}

// Returns the number of batches, and the logs.
std::pair<std::int64_t, Logs> evaluate_batches(const Model& model, const Dataset& data, std::int64_t steps) {
  auto& impl = unwrap(model);
  train::Tracker tracker(*impl.compiled, impl.strategy.num_local_replicas(), impl.topology.all);
  std::optional<PerReplica<train::StepResult>> results;
  const auto visit = [&](PerReplica<internal::Part>& batch) {
    results.emplace(impl.execution->evaluate(batch, tracker));
  };
  const auto finish = [&](std::span<const double> numbers) {
    const auto sums = tracker.sum_batch(&*results, numbers);
    tracker.count_batch(sums);
    return std::vector<double>(sums.end() - static_cast<std::ptrdiff_t>(numbers.size()), sums.end());
  };
  std::int64_t count = 0;
  with_batches(impl, "evaluate", data, steps, [&](Batches& batches) { count = batches.for_each(visit, finish); });
  return {count, tracker.logs()};
}

// Returns one tensor a batch.
std::vector<Tensor> predict_batches(const Model& model, const Dataset& data, std::int64_t steps) {
  auto& impl = unwrap(model);
  std::vector<Tensor> outputs;
  const auto in_order = data.with_options({.auto_shard_policy = AutoShardPolicy::data});
  const auto visit = [&](PerReplica<internal::Part>& batch) {
    outputs.push_back(rows_of_all(impl.topology.all, on_host(impl.execution->predict(batch))));
  };
  const auto sum = [&](std::span<const double> numbers) {
    std::vector<double> sums(numbers.begin(), numbers.end());
    if (!sums.empty()) impl.topology.all.sum(sums);
    return sums;
  };
  with_batches(impl, "predict", in_order, steps, [&](Batches& batches) { batches.for_each(visit, sum); });
  return outputs;
}

Logs evaluate_here(const Model& model, const Dataset& data, const EvaluateOptions& options) {
  auto& impl = unwrap(model);
  impl.execution->fetch_for_forward();
  std::int64_t batches = 0;
  Logs logs;
  impl.on_all_in_section("evaluate", [&] { std::tie(batches, logs) = evaluate_batches(model, data, options.steps); });
  if (options.verbose > 0 && impl.strategy.is_chief()) train::print_line(text(batches, "/", batches), logs);
  return logs;
}

}  // namespace

Logs train::evaluate_values(const Model& model, const Dataset& data, std::int64_t steps) {
  return evaluate_batches(model, data, steps).second;
}

Logs Model::evaluate(const Dataset& data, const EvaluateOptions& options) {
  impl_->require_compiled("evaluate");
  const auto kept = data.keeping_first();
  impl_->build_for(kept, "evaluate");
  return impl_->lead->call("evaluate", [&] { return evaluate_here(*this, kept, options); });
}

Tensor Model::predict(const Dataset& data, const PredictOptions& options) {
  auto& impl = *impl_;
  const auto kept = data.keeping_first();
  impl.build_for(kept, "predict");
  impl.execution->fetch_for_forward();
  std::vector<Tensor> outputs;
  impl.on_all_in_section("predict", [&] { outputs = predict_batches(*this, kept, options.steps); });
  return one_after_the_other(outputs);
}

}  // namespace lockstep
