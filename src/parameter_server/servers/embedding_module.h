// The module of a ShardedEmbedding, and the embeddings and tables of a model.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gradient/replicated_parameters.h"
#include "lockstep/servers/sharded_embedding.h"
#include "parameter_server/client.h"
#include "strategy/kind.h"

namespace lockstep::servers {

// Its replica's thread uses it in steps; another thread may between them.
class EmbeddingModule : public strategy::RowsOnServers {
 public:
  EmbeddingModule(std::int64_t rows, std::int64_t width, const ShardedEmbeddingOptions& options);

  // Returns the table's spec, without a name, and with the seed 0 where the options have none.
  const parameter_server::TableSpec& table() const { return table_; }
  const ShardedEmbeddingOptions& options() const { return options_; }

  Tensor forward(const Tensor& ids);

  // Says where the rows are: in table `number` of the client. A null client: nowhere any more. `seconds`: how long a
  // call to the servers may take. Throws InvalidArgument where the module has another client.
  void bind(std::shared_ptr<parameter_server::Client> client, std::size_t number, double seconds);
  void unbind(const parameter_server::Client& client);

  // Rows that forward has read, and the sums of their gradients, in memory that servers on this host access.
  struct Used {
    Used(const parameter_server::Client& client, std::size_t table, std::span<const std::int64_t> given,
         Deadline deadline);

    Memory memory;
    std::span<std::int64_t> ids;  // ordered by server_of_row
    std::byte *values = nullptr, *gradients = nullptr;
    std::vector<bool> has_gradient;  // [row]: false until backward first wrote it

    parameter_server::Rows gradient_rows() const { return {ids, gradients}; }
  };
  // The rows that took part in a backward since the last `clear`.
  using AllUsed = std::vector<std::shared_ptr<Used>>;
  const AllUsed& used() const { return *used_; }
  void clear() { used_->clear(); }

 private:
  parameter_server::TableSpec table_;
  const ShardedEmbeddingOptions options_;
  std::shared_ptr<parameter_server::Client> client_;
  std::size_t number_ = 0;
  double seconds_ = 0;
  const std::shared_ptr<AllUsed> used_ = std::make_shared<AllUsed>();
  AllUsed abandoned_;  // rows of calls that failed: a server may still write there
};

// Returns a replica's embeddings, each once, in the module's order.
std::vector<std::shared_ptr<EmbeddingModule>> embeddings_of(const ReplicatedParameters& parameters, int replica);

// Returns the embeddings' tables, by the modules' names. A table without a seed gets one from the program's sequence.
std::vector<parameter_server::TableSpec> tables_of(const ReplicatedParameters& parameters);

}  // namespace lockstep::servers
