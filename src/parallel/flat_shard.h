// Parameters of one dtype in one flat buffer, of which each rank keeps an equal part.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gradient/ownership.h"
#include "lockstep/collective/communicator.h"
#include "lockstep/ops/tensor.h"

namespace lockstep::parallel {

class PartialParameter;

// The flat buffer is rank 0's part, rank 1's part, ...; parameters lie in it one after the other, each on a 64-byte
// boundary, and are cut where parts end. While it is not gathered the module's parameters have shapes, but no values.
class FlatShard {
 public:
  // The dtypes in which parameters are gathered, and their gradients summed.
  struct Precision {
    at::ScalarType gathered, summed;
  };

  // Collective: takes rank 0's values, over replicas too, and frees the parameters' memory. Parameters are of one
  // dtype, in which the shards stay, and on one device, where they are gathered and their gradients are summed. Shards,
  // and their gradients, are on `place`: that device, or the CPU.
  FlatShard(std::vector<std::string> names, std::vector<Tensor> parameters, const Communicator& ranks,
            const Communicator& replicas, Precision precision, at::Device place);
  ~FlatShard();
  FlatShard(const FlatShard&) = delete;
  FlatShard& operator=(const FlatShard&) = delete;

  // `of`: whose its calls are, for messages, such as "unit "blocks.0" of fully_shard 1". All ranks give the same words.
  void name_purposes(const std::string& of);

  const std::vector<std::string>& names() const { return names_; }
  const std::vector<Tensor>& parameters() const { return parameters_; }  // the module's

  // This rank's part of parameter i, flat: a leaf, perhaps of no elements. Shards lie in one piece of memory, of
  // own_elements(), and may be moved together by Tensor::set_data.
  const Tensor& shard(std::size_t i) const { return shards_[i]; }
  std::int64_t own_elements() const { return part_; }

  // Which elements of the parameters, slots 0, 1, ..., each rank's part has.
  const std::shared_ptr<const gradient::Ownership>& ownership() const { return ownership_; }

  // True where the parameters were trained when they were divided: only then their gradients are summed.
  bool is_trained() const { return is_trained_; }

  // Throws InvalidArgument where a parameter that was frozen is to be trained now, which is not possible.
  void check_frozen() const;

  // Collective. Begins, and ends, to gather the values; `finish` begins too where `start` was not called.
  void start_gather();
  void finish_gather();

  // From now on `writes` counts the operators that write a shard, or a tensor that shares its memory, such as
  // shard.data().
  void count_writes(const std::shared_ptr<std::atomic<std::int64_t>>& writes);

  // Returns another number after each change of the shards.
  std::int64_t version() const;

  // Throws Error where the values are there, and shards have changed since. Looks at each shard.
  void check_unchanged() const;

  void release();
  void abandon_gather();  // after a rank was lost: also one that failed

  // Collective: the values of all parameters, as the shards have them. New tensors in host memory.
  std::vector<Tensor> gather_values();

  // Collective: sets all values to rank 0's; elsewhere `values` are not read.
  void set_values(const std::vector<Tensor>& values);

  // Takes the gradient that backward left on parameter i, times `factor`.
  void take_gradient(std::size_t i, double factor);
  bool has_taken(std::size_t i) const { return taken_[i]; }
  void forget_gradients();

  // Collective: sums the gradients that ranks and replicas took. Where one took none it counts as zero. On a GPU the
  // sums go on beside later operators, until finish_sums.
  void start_sums();
  void finish_sums();

  // Adds the sums to the gradients of shards, but for parameters that no rank took a gradient of. After finish_sums.
  void set_gradients(const std::vector<bool>& taken_by_any);

 private:
  void run(Call call, const Tensor& tensor, const Communicator& among, Purpose purpose) const;
  void prepare_gather();
  void sum_over_replicas();
  void bind();
  Tensor own_piece(const Tensor& part, std::size_t i) const;  // parameter i's shard, of this rank's part
  Tensor whole_flat(at::ScalarType dtype, at::Device device) const;
  const Tensor& own();

  const std::vector<std::string> names_;
  const std::vector<Tensor> parameters_;
  const Communicator ranks_, replicas_;
  const at::ScalarType dtype_;
  const Precision precision_;
  const at::Device device_;  // the parameters'
  const bool is_trained_;
  const gradient::FlatLayout layout_;
  const std::int64_t part_;  // elements of one rank
  const std::shared_ptr<const gradient::Ownership> ownership_;
  Tensor own_;  // this rank's part
  std::vector<Tensor> shards_;
  c10::Storage storage_;  // the parameters', which has memory while it is gathered
  Tensor sent_, whole_;   // this rank's part, and all parts, in the precision in which they are gathered; on device_
  std::optional<Work> gathering_;
  bool is_gathered_ = false;
  std::int64_t gathered_version_ = 0;                  // of the shards
  std::shared_ptr<std::atomic<std::int64_t>> writes_;  // null: not counted
  Purpose values_, gather_, sum_;                      // of calls
  Tensor gradients_;                                   // of all parameters, until they are reduced
  Tensor memory_for_sums_, sums_;  // of this rank's part, in the precision of the sums, on device_; the memory is kept
                                   // in host memory alone
  std::optional<Work> summing_;
  std::vector<bool> taken_;
};

// All shards in this process, by their tensors. Any thread.

// `ranks`: those that have the other parts. `of`: partial_of the module's parameter before it was divided.
void know_shard(const Tensor& shard, const Communicator& ranks, std::shared_ptr<const PartialParameter> of);
void forget_shard(const Tensor& shard);

// True where one of the tensors is a shard. The second function asks for a shard of which these ranks have the other
// parts.
bool any_is_shard(const std::vector<Tensor>& tensors);
bool any_is_shard_of(const std::vector<Tensor>& tensors, const Communicator& ranks);

// The result of partial_of for the parameter of which the tensor is a shard: not null where other ranks have other
// parameters in its place. Null for a tensor that is no shard.
std::shared_ptr<const PartialParameter> partial_of_shard(const Tensor& tensor);

}  // namespace lockstep::parallel
