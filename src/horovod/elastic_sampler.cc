#include <algorithm>
#include <numeric>
#include <random>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/horovod/elastic.h"

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
  if (dataset_size < 1) {
    throw InvalidArgument(text("ElasticSampler: dataset_size is ", dataset_size, "; it must be at least 1"));
  }
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

}  // namespace lockstep::horovod::elastic
