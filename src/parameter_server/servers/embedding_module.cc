#include "parameter_server/servers/embedding_module.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <set>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/random.h"
#include "ops/tensors.h"
#include "parameter_server/table.h"
#include "train/layers/specs.h"

namespace lockstep {
namespace servers {
namespace {

using Used = EmbeddingModule::Used;

// The different ids of a tensor, ordered by their servers, and the number of each element's id among them.
struct DifferentIds {
  DifferentIds(const Tensor& given, int servers) : places(at::empty({given.numel()}, given.options())) {
    const std::span all(given.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(given.numel()));
    const std::span place(places.mutable_data_ptr<std::int64_t>(), all.size());
    parameter_server::IdMap map(all.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      place[i] = map.insert(all[i], static_cast<std::uint32_t>(ids.size()));
      if (place[i] == static_cast<std::int64_t>(ids.size())) ids.push_back(all[i]);
    }
    if (servers > 1) order(servers, place);
  }

  std::vector<std::int64_t> ids;
  Tensor places;

 private:
  void order(int servers, std::span<std::int64_t> place) {
    std::vector<std::vector<std::size_t>> of_server(static_cast<std::size_t>(servers));
    for (std::size_t i = 0; i < ids.size(); ++i) {
      of_server[static_cast<std::size_t>(parameter_server::server_of_row(ids[i], servers))].push_back(i);
    }
    std::vector<std::int64_t> ordered, moved_to(ids.size());
    for (const auto& own : of_server) {
      for (const auto i : own) {
        moved_to[i] = static_cast<std::int64_t>(ordered.size());
        ordered.push_back(ids[i]);
      }
    }
    ids.swap(ordered);
    for (auto& at : place) at = moved_to[static_cast<std::size_t>(at)];
  }
};

template <class T>
void add_gradients(const Tensor& of_places, const Tensor& places, Used& used) {
  const auto* const row_of = places.const_data_ptr<std::int64_t>();
  const auto* from = of_places.const_data_ptr<T>();
  const auto width = of_places.size(1);
  for (std::int64_t i = 0; i < of_places.size(0); ++i, from += width) {
    const auto row = static_cast<std::size_t>(row_of[i]);
    T* const to = reinterpret_cast<T*>(used.gradients) + row_of[i] * width;
    if (used.has_gradient[row]) {
      for (std::int64_t k = 0; k < width; ++k) to[k] += from[k];
    } else {
      std::copy_n(from, width, to);
      used.has_gradient[row] = true;
    }
  }
}

struct UsedHolder : torch::CustomClassHolder {
  UsedHolder(std::shared_ptr<Used> given, std::shared_ptr<EmbeddingModule::AllUsed> that_took_part)
      : used(std::move(given)), took_part(std::move(that_took_part)) {}
  const std::shared_ptr<Used> used;
  const std::shared_ptr<EmbeddingModule::AllUsed> took_part;
};

// Copies rows to their places. Backward adds up the gradients of a row's places in `used`, and gives `rows` none.
struct TakeRows : torch::autograd::Function<TakeRows> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& rows, const Tensor& places,
                        const c10::intrusive_ptr<UsedHolder>& used) {
    context->saved_data["used"] = c10::IValue::make_capsule(used);
    context->saved_data["places"] = places;
    return at::index_select(rows, 0, places);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto holder = c10::static_intrusive_pointer_cast<UsedHolder>(context->saved_data["used"].toCapsule());
    const auto places = context->saved_data["places"].toTensor();
    const auto gradient = gradients[0].to(at::kCPU).contiguous();
    if (gradient.scalar_type() == at::kDouble) {
      add_gradients<double>(gradient, places, *holder->used);
    } else {
      add_gradients<float>(gradient, places, *holder->used);
    }
    auto& all = *holder->took_part;
    if (std::find(all.begin(), all.end(), holder->used) == all.end()) all.push_back(holder->used);
    return {Tensor(), Tensor(), Tensor()};
  }
};

constexpr std::size_t aligned(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

EmbeddingModule::EmbeddingModule(std::int64_t rows, std::int64_t width, const ShardedEmbeddingOptions& options)
    : RowsOnServers("ShardedEmbedding"),
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
        "a ShardedEmbedding is in two models, or its model is compiled again or has several optimizers: the rows on "
        "servers are those of one model and optimizer");
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
  const bool trains = at::GradMode::is_enabled();
  if (client_ == nullptr) {
    if (!trains) return at::zeros(sizes, ids.options().dtype(dtype));
    throw InvalidArgument(
        "a ShardedEmbedding trains without servers: its module must be registered in the model's (register_module), "
        "and the model compiled with ParameterServerStrategy");
  }
  const auto deadline = Deadline::after(std::chrono::duration<double>(seconds_));
  const DifferentIds different(ids.to(at::kCPU, at::kLong).contiguous(), client_->servers());
  const auto used = std::make_shared<Used>(*client_, number_, different.ids, deadline);
  try {
    client_->pull_rows(number_, used->ids, used->values, deadline);
  } catch (...) {
    abandoned_.push_back(used);
    throw;
  }
  auto rows = at::from_blob(
      used->values, {static_cast<std::int64_t>(different.ids.size()), table_.width}, [used](void*) {}, dtype);
  if (!trains) return at::index_select(rows, 0, different.places).view(sizes).to(ids.device());
  rows.requires_grad_(true);
  return TakeRows::apply(rows, different.places, c10::make_intrusive<UsedHolder>(used, used_))
      .view(sizes)
      .to(ids.device());
}

EmbeddingModule::Used::Used(const parameter_server::Client& client, std::size_t table,
                            std::span<const std::int64_t> given, Deadline deadline)
    : has_gradient(given.size()) {
  const auto bytes = given.size() * client.tables()[table].row_bytes();
  memory = client.share_rows(aligned(given.size_bytes()) + 2 * aligned(bytes), deadline);
  ids = {reinterpret_cast<std::int64_t*>(memory.get()), given.size()};
  std::copy(given.begin(), given.end(), ids.begin());
  values = memory.get() + aligned(given.size_bytes());
  gradients = values + aligned(bytes);
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

}  // namespace servers

ShardedEmbedding::ShardedEmbedding(std::int64_t input_dim, std::int64_t output_dim, ShardedEmbeddingOptions options)
    : module_(std::make_shared<servers::EmbeddingModule>(input_dim, output_dim, options)) {}

Tensor ShardedEmbedding::operator()(const Tensor& ids) const { return module_->forward(ids); }
std::shared_ptr<torch::nn::Module> ShardedEmbedding::ptr() const { return module_; }

ShardedEmbedding ShardedEmbedding::copy() const {
  return {module_->table().rows, module_->table().width, module_->options()};
}

Layer::Layer(const ShardedEmbedding& embedding)
    : Layer(train::spec_of("sharded_embedding", [embedding](const Tensor&) {
        const auto own = embedding.copy();
        return BuiltLayer{own.ptr(), [own](const Tensor& x) { return own(x); }};
      })) {}

}  // namespace lockstep
