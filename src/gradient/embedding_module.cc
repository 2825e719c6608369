#include "gradient/embedding_module.h"

#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <set>

#include "base/hash.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/random.h"
#include "ops/dtypes.h"
#include "parameter_server/id_map.h"

namespace lockstep {
namespace gradient {
namespace {

// The different ids of a tensor, in the order in which they first appear, and which of them each element is.
struct DifferentIds {
  explicit DifferentIds(const Tensor& given) : places(at::empty(given.sizes(), given.options())) {
    const std::span all(given.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(given.numel()));
    auto* place = places.mutable_data_ptr<std::int64_t>();
    parameter_server::IdMap map;
    for (const auto id : all) {
      *place = map.insert(id, static_cast<std::uint32_t>(ids.size()));
      if (*place++ == static_cast<std::int64_t>(ids.size())) ids.push_back(id);
    }
  }
  std::vector<std::int64_t> ids;
  Tensor places;
};

}  // namespace

EmbeddingModule::EmbeddingModule(std::int64_t rows, std::int64_t width, const ShardedEmbeddingOptions& options)
    : torch::nn::Module("ShardedEmbedding"),
      table_{.name = "ShardedEmbedding",
             .dtype = options.dtype,
             .rows = rows,
             .width = width,
             .initializer = options.embeddings_initializer,
             .seed = options.seed.value_or(0),
             .admit_after = options.admit_after,
             .evict_after = options.evict_after},
      options_(options) {
  check(table_);
}

void EmbeddingModule::bind(std::shared_ptr<parameter_server::Client> client, std::size_t number, double seconds) {
  if (client_ != nullptr && client != client_) {
    throw InvalidArgument(
        "a model with a ShardedEmbedding is compiled again, or by several optimizers: its rows, which are on servers, "
        "would be lost");
  }
  client_ = std::move(client);
  number_ = number;
  seconds_ = seconds;
}

void EmbeddingModule::unbind(const parameter_server::Client& client) {
  if (client_.get() == &client) client_.reset();
  clear();
}

Tensor EmbeddingModule::forward(const Tensor& ids) {
  if (!at::isIntegralType(ids.scalar_type(), /*includeBool=*/false)) {
    throw InvalidArgument(text("ShardedEmbedding: the ids are ", ids.scalar_type(), "; they must be integers"));
  }
  const auto dtype = ops::scalar_type_of(table_.dtype);
  auto sizes = ids.sizes().vec();
  sizes.push_back(table_.width);
  const bool trains = is_training() && at::GradMode::is_enabled();
  if (client_ == nullptr) {
    if (!trains) return at::zeros(sizes, ids.options().dtype(dtype));
    throw InvalidArgument(
        "a ShardedEmbedding trains without servers: its module must be registered in the model's (register_module), "
        "and the model compiled with ParameterServerStrategy");
  }
  DifferentIds different(ids.to(at::kCPU, at::kLong).contiguous());
  const auto rows = at::empty({static_cast<std::int64_t>(different.ids.size()), table_.width}, dtype);
  client_->pull_rows(number_, different.ids, static_cast<std::byte*>(rows.mutable_data_ptr()),
                     Deadline::after(std::chrono::duration<double>(seconds_)));
  if (trains) {
    rows.requires_grad_(true);
    used_.push_back({std::move(different.ids), rows});
  }
  return at::embedding(rows.to(ids.device()), different.places.to(ids.device()));
}

std::vector<std::shared_ptr<EmbeddingModule>> embeddings_of(const ReplicatedParameters& parameters, int replica) {
  std::vector<std::shared_ptr<EmbeddingModule>> found;
  std::set<const torch::nn::Module*> seen;
  for (const auto& module : parameters.module(replica).modules(/*include_self=*/false)) {
    auto embedding = std::dynamic_pointer_cast<EmbeddingModule>(module);
    if (embedding != nullptr && seen.insert(embedding.get()).second) found.push_back(std::move(embedding));
  }
  return found;
}

std::vector<parameter_server::TableSpec> tables_of(const ReplicatedParameters& parameters) {
  std::vector<parameter_server::TableSpec> tables;
  std::set<const torch::nn::Module*> seen;
  for (const auto& named : parameters.module(0).named_modules("", /*include_self=*/false)) {
    const auto embedding = std::dynamic_pointer_cast<EmbeddingModule>(named.value());
    if (embedding == nullptr || !seen.insert(embedding.get()).second) continue;
    auto table = embedding->table();
    table.name = named.key();
    if (!embedding->options().seed) table.seed = next_random_seed();
    tables.push_back(table);
  }
  return tables;
}

}  // namespace gradient

ShardedEmbedding::ShardedEmbedding(std::int64_t input_dim, std::int64_t output_dim, ShardedEmbeddingOptions options)
    : module_(std::make_shared<gradient::EmbeddingModule>(input_dim, output_dim, options)) {}

Tensor ShardedEmbedding::operator()(const Tensor& ids) const { return module_->forward(ids); }
std::shared_ptr<torch::nn::Module> ShardedEmbedding::ptr() const { return module_; }

ShardedEmbedding ShardedEmbedding::copy() const {
  return {module_->table().rows, module_->table().width, module_->options()};
}

}  // namespace lockstep
