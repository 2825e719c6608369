// The parameters and buffers of a module that every replica has a copy of, and where their values lie.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collective/topology.h"
#include "gradient/ownership.h"
#include "gradient/parameter_parts.h"
#include "ops/traced_program.h"

namespace torch::nn {
class Module;
}

namespace lockstep::gradient {

// One parameter, the same on all replicas. Tied parameters are one slot with several names.
struct ParameterSlot {
  std::string name;                  // the first name in the module's order
  std::vector<std::string> aliases;  // its other names
  std::vector<std::int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  std::int64_t numel = 0;
  std::int64_t capacity = 0;                         // elements in the flat buffer, if more
  bool is_copy = false;                              // TrainedTensor::is_copy
  std::shared_ptr<const ParameterParts> parts = {};  // of a model that is split, if others have other parts
  std::int64_t offset = 0;  // in the flat buffer of its dtype; a multiple of 64 bytes. Trainable ones come first
  bool trainable = true;    // requires_grad
  bool flat = true;         // float or double: lies in a flat buffer; others (frozen only) stay where they are
};

// Where the values of variables live.
enum class Placement {
  mirrored,  // each replica has its own, in host memory
  central,   // one copy in host memory, which all replicas read
  staged,    // each replica has its own on its device; updates are made to one in host memory, which the devices then
             // copy
  device,    // each replica has its own on its device, where they are updated
};

}  // namespace lockstep::gradient

namespace lockstep {

// Constant after construction, but for the values. Replicas may run at the same time, each on its own copy.
class ReplicatedParameters {
 public:
  // Binds the parameters of all modules to flat buffers, and gives parameters and buffers the values of the chief's
  // module 0. `modules`: one a replica, of one type, each on its replica's device. Collective over the workers. Throws
  // InvalidArgument naming the parameter when modules differ or a trainable parameter is neither float nor double.
  // `on_replicas` calls a function in every replica's thread, so that each
  // allocates its own copy's memory near its cores.
  using OnReplicas = std::function<void(const std::function<void(int)>&)>;
  ReplicatedParameters(std::vector<std::shared_ptr<torch::nn::Module>> modules, gradient::Placement placement,
                       const OnReplicas& on_replicas = {}, const Topology& topology = {});

  // Binds one module, which is split over the processes, in the same way.
  ReplicatedParameters(std::shared_ptr<torch::nn::Module> module, const gradient::ModelPart& split,
                       gradient::Placement placement, const Topology& topology);

  int replicas() const { return static_cast<int>(modules_.size()); }  // of this process
  const Topology& topology() const { return topology_; }
  const std::optional<gradient::ModelPart>& split() const { return split_; }
  bool is_split() const { return split_.has_value(); }

  // True where the processes have the whole model together. A process that comes to an elastic job alone has a part.
  bool is_whole() const { return topology_.all.size() >= topology_.row_size; }

  // True on the first of all workers that have the parameter, or a part of it.
  bool is_first_holder(std::size_t slot) const { return split_ ? first_holder_[slot] : topology_.all.rank() == 0; }

  // The shape of a slot's whole parameter. `whole`: gathers the parts, which have the shape of the processes'
  // parameters; collective where the parameter is divided. `part_of`: this process's part.
  std::vector<std::int64_t> whole_sizes(std::size_t slot) const;
  at::Tensor whole(std::size_t slot, const at::Tensor& part) const;
  at::Tensor part_of(std::size_t slot, const at::Tensor& whole) const;

  gradient::Placement placement() const { return placement_; }
  torch::nn::Module& module(int replica) const { return *modules_[static_cast<std::size_t>(replica)]; }

  const std::vector<gradient::ParameterSlot>& slots() const { return slots_; }
  at::Tensor& parameter(int replica, std::size_t slot) { return parameters_[static_cast<std::size_t>(replica)][slot]; }
  const at::Tensor& parameter(int replica, std::size_t slot) const {
    return parameters_[static_cast<std::size_t>(replica)][slot];
  }

  // How many copies of the values an update writes, and copy k's flat buffer, which is in host memory but for
  // Placement::device.
  int copies() const {
    return placement_ == gradient::Placement::mirrored || placement_ == gradient::Placement::device ? replicas() : 1;
  }
  std::span<const at::Tensor> flats(at::ScalarType dtype) const {
    return dtype == at::kDouble ? flat_double_ : flat_float_;
  }
  const at::Tensor& flat(int copy, at::ScalarType dtype) const { return flats(dtype)[static_cast<std::size_t>(copy)]; }
  std::int64_t flat_numel(at::ScalarType dtype) const;

  // Flat buffers lie one after the other in memory, `flat_bytes()` a copy. `flat_in`: the buffer of `dtype` in the copy
  // number `index` that lies in `memory`; the tensor keeps the memory.
  std::size_t flat_bytes() const;
  at::Tensor flat_in(const Memory& memory, std::size_t index, at::ScalarType dtype) const;

  // Puts copy 0's flat buffers, and the parameters that are bound to them, into memory that `ranks` access fast:
  // mapped_values() where ranks share memory, else the Group's. Does nothing where the buffers lie in this Group's
  // already. Collective, while no replica runs. Returns whether ranks share memory.
  bool move_first_copy(const Communicator& ranks);

  // Puts copy 0 into `memory` of flat_bytes().
  void move_first_copy(const Memory& memory);

  // After move_first_copy, where ranks share memory: the flat buffers of the ranks' first copies, this process's first.
  std::span<const at::Tensor> mapped_values(at::ScalarType dtype) const {
    return dtype == at::kDouble ? mapped_double_ : mapped_float_;
  }

  // Gives the other replicas copy 0's values. Not while replicas run.
  void spread_first_copy();

  // Gives this replica copy 0's values, which nobody writes meanwhile. By the replica's thread.
  void take_first_copy(int replica);

  // Every trainable parameter whole.
  std::vector<gradient::Shard> trainable() const;

  // Names a parameter whose copies on this process's replicas differ in their bits; empty where all are equal. Not
  // while replicas run.
  std::string difference_between_copies() const;

  // Called before replica 0's values are saved for all. Warns where other replicas' differ; throws InvalidArgument
  // where other processes' differ, which train by themselves.
  void check_save() const;

  // Throws InvalidArgument where other processes' values differ, which train by themselves.
  void require_equal_between_processes() const {
    if (watch_.before_save) watch_.before_save();
  }

  // Throw InvalidArgument on all workers, naming a worker and a parameter. compare_models: where models differ in their
  // tensors. compare_copies: where copies are not equal bit for bit, by a fault of a processor or a program. Collective
  // over the workers; not while replicas run.
  void compare_models(const Communicator& workers) const;
  std::string describe() const;  // what is compared: a line a tensor

  // As `describe`, of the whole model where it is split.
  std::string describe_whole() const { return split_ ? split_->description : describe(); }
  void compare_copies(const Communicator& workers) const { workers.check_all_agree("copies", hashes()); }
  std::string hashes() const;  // of all copies: a line a tensor

  // In an elastic job: goes on with the Groups of all workers where these were replaced. Collective over all workers,
  // between steps.
  void regroup();

  // For a model that is split. Throws InvalidArgument on all workers, naming a parameter, where workers that have it
  // whole have different values, but for rounding: each computes the gradient for itself. Collective over all workers.
  void compare_whole_copies() const;

  // Gives the parameters of all replicas the requires_grad of replica 0, whose module alone users reach. Not to be
  // called while replicas run.
  void follow_first_replica();

  // As follow_first_replica, and takes from replica 0 which parameters a new optimizer trains.
  void update_trainable();

  // Throws InvalidArgument naming a parameter that requires a gradient, and did not when its optimizer was made.
  void require_known_trainable() const;

  // The parameters that require no gradient now, a line each. Processes must agree on them.
  std::string describe_frozen() const;

  // With staged placement copies the host's values to the replica's device; else the replica reads the host's.
  void refresh(int replica);

  // Names and replica 0's tensors of the modules' buffers, such as BatchNorm's running statistics.
  const std::vector<std::string>& buffer_names() const { return buffer_names_; }
  const at::Tensor& buffer(int replica, std::size_t index) const {
    return buffers_[static_cast<std::size_t>(replica)][index];
  }

  // The mean of each buffer over the replicas of all workers that train on other examples. A replica counts by the
  // examples that its buffers have seen since all had the same values; all count alike before any example. Where the
  // dtype is not floating-point, the result is the value of the first replica among those that have seen most. Not to
  // be called while replicas run. Collective over these workers.
  std::vector<at::Tensor> average_buffers() const;

  // As average_buffers, over this process's replicas alone; not collective.
  std::vector<at::Tensor> average_own_buffers() const;

  // How many examples a replica's buffers have seen. `count_examples` is called by the replica's thread, after a
  // forward pass in training mode.
  void count_examples(int replica, double examples) { seen_[static_cast<std::size_t>(replica)] += examples; }
  const std::vector<double>& seen() const { return seen_; }
  void set_seen(int replica, double examples) { seen_[static_cast<std::size_t>(replica)] = examples; }
  void forget_seen() { seen_.assign(seen_.size(), 0); }  // after all got the same values

  // `seen` of the replicas, numbered through, of all workers that train on other examples. Collective over these
  // workers.
  std::vector<double> seen_by_all() const;

  // For a strategy whose replicas run compiled programs. From put_on on, parameters and buffers are variables of its
  // devices. `fetch` brings their values into this host's tensors, and does nothing before put_on.
  void put_on(ops::ProgramDevices& devices);
  void fetch(Deadline deadline) const;
  ops::DeviceVariable& variable(std::size_t slot) const;
  ops::DeviceVariable& variable_of_buffer(std::size_t index) const;

  // Whoever keeps something that depends on the values. on_assign: a parameter was overwritten by `assign`.
  // before_save: throws where the values cannot be saved now. One at a time; the last one counts.
  struct ValueWatch {
    const void* who = nullptr;  // only compared
    std::function<void(std::size_t slot)> on_assign;
    std::function<void()> before_save;
  };
  void watch_values(ValueWatch watch) { watch_ = std::move(watch); }
  bool are_watched_by(const void* who) const { return watch_.who == who; }

  // Overwrites a parameter, or a buffer, on all replicas, or a buffer on one. The caller checks shapes. Not while
  // replicas run.
  void assign(std::size_t slot, const at::Tensor& value);
  std::int64_t assignments() const { return assignments_; }  // of parameters, so far
  void assign_buffer(std::size_t index, const at::Tensor& value);
  void assign_buffer_of(int replica, std::size_t index, const at::Tensor& value);

 private:
  ReplicatedParameters(std::vector<std::shared_ptr<torch::nn::Module>> modules,
                       std::optional<gradient::ModelPart> split, gradient::Placement placement,
                       const OnReplicas& on_replicas, const Topology& topology);
  const Communicator& same_model() const;
  void find_slots();
  void check_same_as_first(int replica);
  void take_memory(const OnReplicas& on_replicas);
  void bind();
  at::Tensor place(int replica, const gradient::ParameterSlot& slot) const;
  void bind_first_copy(const at::Tensor& memory);
  void share_values();
  void find_first_holders();
  at::Tensor sum_of_own_buffers(std::size_t index, std::span<const double> weights) const;

  Topology topology_;
  std::optional<gradient::ModelPart> split_;
  std::vector<bool> first_holder_;                    // [slot], of a model that is split
  std::int64_t regroups_ = topology_.all.regroups();  // when the two above were made
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
  gradient::Placement placement_;
  std::vector<gradient::ParameterSlot> slots_;
  std::vector<std::vector<at::Tensor>> parameters_;       // [replica][slot]
  std::vector<at::Tensor> flat_float_, flat_double_;      // [copy]
  std::optional<std::int64_t> moved_to_;                  // the number of regroups of ranks whose memory has copy 0
  std::vector<at::Tensor> mapped_float_, mapped_double_;  // as mapped_values
  std::vector<at::Tensor> device_float_, device_double_;  // [replica], staged only
  std::vector<std::string> buffer_names_;
  std::vector<std::vector<at::Tensor>> buffers_;  // [replica][index]
  ValueWatch watch_;
  std::int64_t assignments_ = 0;
  std::vector<double> seen_;                         // [replica]: examples, by its buffers
  std::shared_ptr<ops::DeviceVariables> variables_;  // of slots, then of buffers; null before put_on
};

}  // namespace lockstep
