#include "lockstep/horovod/elastic.h"

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <sstream>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/state.h"
#include "front_ends/horovod/generations.h"
#include "front_ends/horovod/operations.h"
#include "front_ends/horovod/session.h"
#include "lockstep/base/error.h"

namespace lockstep::horovod::elastic {

namespace {

// Fisher-Yates, whose order does not depend on the standard library.
void shuffle(std::vector<std::int64_t>& indices, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (std::size_t i = indices.size(); i > 1; --i) std::swap(indices[i - 1], indices[random() % i]);
}

}  // namespace

ElasticSampler::ElasticSampler(std::int64_t dataset_size, bool shuffle, std::uint64_t seed)
    : dataset_size_(dataset_size), shuffle_(shuffle), seed_(seed) {
  require(dataset_size >= 1, "ElasticSampler: dataset_size", dataset_size, "at least 1");
  reset();
}

void ElasticSampler::set_epoch(std::int64_t epoch) {
  epoch_ = epoch;
  processed_ = 0;
  reset();
}

void ElasticSampler::record_batch(std::int64_t batch, std::int64_t batch_size) {
  const auto mine = std::min((batch + 1) * batch_size, static_cast<std::int64_t>(indices_.size()));
  processed_ = std::min(processed_before_ + mine * size(), dataset_size_);
}

std::vector<std::int64_t> ElasticSampler::get_indices(std::int64_t batch, std::int64_t batch_size) const {
  const auto count = static_cast<std::int64_t>(indices_.size());
  const auto begin = std::min(batch * batch_size, count), end = std::min(begin + batch_size, count);
  return {indices_.begin() + begin, indices_.begin() + end};
}

std::int64_t ElasticSampler::batches(std::int64_t batch_size) const {
  return (static_cast<std::int64_t>(indices_.size()) + batch_size - 1) / batch_size;
}

void ElasticSampler::reset() {
  std::vector<std::int64_t> all(static_cast<std::size_t>(dataset_size_));
  std::iota(all.begin(), all.end(), 0);
  if (shuffle_) elastic::shuffle(all, seed_ + static_cast<std::uint64_t>(epoch_));
  processed_before_ = processed_;
  all.erase(all.begin(), all.begin() + processed_);
  indices_.clear();
  const auto left = static_cast<std::int64_t>(all.size()), ranks = static_cast<std::int64_t>(size());
  for (std::int64_t i = rank(); i < (left + ranks - 1) / ranks * ranks; i += ranks) {
    indices_.push_back(all[static_cast<std::size_t>(i % left)]);
  }
}

Trackable ElasticSampler::trackable() {
  const auto save = [this](Archive& archive, const std::string& prefix) {
    archive.entries[prefix + "/epoch"] = text(epoch_);
    archive.entries[prefix + "/processed"] = text(processed_);
  };
  const auto load = [this](const Archive& archive, const std::string& prefix) -> std::function<void()> {
    const auto epoch = archive.integer(prefix + "/epoch"), processed = archive.integer(prefix + "/processed");
    if (processed < 0 || processed > dataset_size_) {
      throw InvalidArgument(text("ElasticSampler: ", processed, " indices were used of ", dataset_size_));
    }
    return [this, epoch, processed] {
      epoch_ = epoch;
      processed_ = processed;
      reset();
    };
  };
  return {save, load};
}

void State::register_reset_callbacks(std::vector<std::function<void()>> callbacks) {
  for (auto& callback : callbacks) callbacks_.push_back(std::move(callback));
}

void State::on_reset() {
  reset();
  for (const auto& callback : callbacks_) callback();
}

void State::commit() {
  if (Session::exists()) Session::current()->synchronize();  // what a failed call on a GPU left must not be saved
  save();
  ++commits_;
  check_host_updates();
}

void State::check_host_updates() {
  const auto generations = Generations::current();
  if (!generations) return;
  const auto session = Session::current();
  auto sums = generations->says();
  session->run([&] {
    session->negotiate(Announcement::of("check_host_updates"));
    session->carry_out(Call::all_reduce({sums.data(), sums.size(), DType::float64}, ReduceOp::sum));
  });
  if (generations->changes(sums)) throw HostsUpdatedInterrupt("ranks come or leave");
}

int State::newest_rank() {
  const auto session = Session::current();
  const auto generations = Generations::current();
  const std::int64_t mine = generations && generations->lacks_state() ? -1 : commits_;
  std::vector<std::int64_t> commits(static_cast<std::size_t>(session->size()));
  session->run([&] {
    session->negotiate(Announcement::of("sync of an elastic state"));
    session->carry_out(Call::all_gather({&mine, 1, DType::int64}, {commits.data(), commits.size(), DType::int64}));
  });
  const auto newest = std::max_element(commits.begin(), commits.end());
  if (*newest < 0) throw ClusterError("all ranks that had the state of the training were lost before this one got it");
  newest_ = *newest;
  return static_cast<int>(newest - commits.begin());
}

ObjectState::ObjectState(std::map<std::string, Trackable> objects)
    : all_(checkpoint::compose({objects.begin(), objects.end()})), saved_(checkpoint::print_state(all_)) {}

void ObjectState::save() { saved_ = checkpoint::print_state(all_); }
void ObjectState::restore() { checkpoint::parse_state("an elastic state", saved_, all_)(); }
void ObjectState::sync() { sync_from(newest_rank()); }

void ObjectState::sync_from(int root) {
  saved_ = broadcast_bytes(
      "sync of an elastic state's objects", [this] { return checkpoint::print_state(all_); }, root);
  ObjectState::restore();
}

struct TorchState::Copy {
  std::vector<Tensor> values;  // parameters and buffers, in the module's order
  std::string optimizer;
};

namespace {

std::vector<Tensor> values_of(const torch::nn::Module& module) {
  auto values = module.parameters();
  for (const auto& buffer : module.buffers()) values.push_back(buffer);
  return values;
}

}  // namespace

TorchState::TorchState(torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                       std::map<std::string, Trackable> objects)
    : ObjectState(std::move(objects)), module_(module), optimizer_(optimizer), copy_(std::make_unique<Copy>()) {
  TorchState::save();
}

TorchState::~TorchState() = default;

void TorchState::save() {
  const at::NoGradGuard no_grad;
  const auto values = values_of(module_);
  copy_->values.resize(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    auto& copy = copy_->values[i];
    copy.defined() ? copy.copy_(values[i]) : copy = values[i].detach().clone();
  }
  std::ostringstream out;
  torch::save(optimizer_, out);
  copy_->optimizer = out.str();
  ObjectState::save();
}

void TorchState::restore() {
  const at::NoGradGuard no_grad;
  auto values = values_of(module_);
  for (std::size_t i = 0; i < values.size(); ++i) values[i].copy_(copy_->values[i]);
  optimizer_.state().clear();  // load would keep entries that the copy lacks
  std::istringstream in(copy_->optimizer);
  torch::load(optimizer_, in);
  ObjectState::restore();
}

void TorchState::sync() {
  const int root = newest_rank();
  broadcast_parameters(module_, root);
  broadcast_optimizer_state(optimizer_, root);
  sync_from(root);
  save();
}

std::function<void(State& state)> run(std::function<void(State& state)> train) {
  return [train = std::move(train)](State& state) {
    const auto generations = Generations::current();
    const auto sync_and_train = [&] {
      state.sync();
      state.commits_ = state.newest_;
      if (generations) generations->has_state();
      train(state);
    };
    if (!generations) return sync_and_train();
    generations->begin_training();
    while (true) {
      std::vector<int> lost;
      try {
        sync_and_train();
        return generations->end_training();
      } catch (const HostsUpdatedInterrupt&) {
      } catch (const std::exception& error) {
        const auto ranks = generations->lost_in(error);
        if (!ranks) throw;
        log_warning(text("training goes on from its last commit: ", error.what()));
        state.restore();
        lost = *ranks;
      }
      generations->regroup(std::move(lost));
      state.on_reset();
    }
  };
}

}  // namespace lockstep::horovod::elastic
