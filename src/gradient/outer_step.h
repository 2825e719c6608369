// The outer step of DiLoCo: ranks that train by themselves bring their values together.
//
//   delta    = mean over the ranks of (anchor - value)
//   velocity = momentum * velocity + delta
//   anchor   = anchor - learning_rate * (delta + momentum * velocity)
//   value    = anchor
//
// A parameter whose values have not changed on any rank, such as a frozen one, stays as it is.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gradient/eight_bit_mean.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/collective/communicator.h"
#include "lockstep/gradient/diloco_options.h"

namespace lockstep::gradient {

// Throws InvalidArgument for an option out of its range.
void check(const DiLoCoOptions& options);

// One line an option: ranks must have the same.
std::string describe(const DiLoCoOptions& options);

// One thread at a time. All ranks make the same calls.
class OuterStep {
 public:
  // `parameters`: float or double, with the same values on all ranks. Their memory may be replaced, but not their
  // shapes. `called`: for messages and timelines. `has_state`: false on a rank that comes to others, from whom it gets
  // the state in its first `regroup`.
  OuterStep(const std::vector<at::Tensor>& parameters, Communicator ranks, DiLoCoOptions options, std::string called,
            bool has_state = true);
  ~OuterStep();
  OuterStep(const OuterStep&) = delete;
  OuterStep& operator=(const OuterStep&) = delete;

  // Called after each step. Returns whether values of this rank have changed.
  bool advance();

  // As DiLoCo::meet. The steps to the next meetings are counted from here.
  void meet() {
    come_together();
    since_ = 0;
  }

  // As `meet`, but the next meetings come when they would have come without this one.
  void come_together();

  // For options of one part and no overlap: a meeting of the ranks that have the state, after the ranks' Communicator
  // has got another Group. Collective. Its mean is over the ranks that have made steps since their last meeting: a rank
  // that was lost takes its own along. A meeting may have broken off on some ranks alone. These, and ranks without
  // state, take the state of a rank that has completed the meeting. Afterwards values are equal on all, and the next
  // meetings come when they would have come. Throws ClusterError where no rank has the state. Throws what the Group
  // throws; then `regroup` is called for the next Group.
  void regroup();

  // Counts a step that other ranks have made and this one leaves out.
  void skip_step();

  // The counts of steps, for a rank that comes later. Not collective. This object must outlive it.
  Trackable counts();

  // True where all values are those of a meeting, with the same bits on all ranks.
  bool is_together() const { return is_together_; }
  void require_together() const;  // throws InvalidArgument, which says when values can be saved
  std::int64_t steps() const { return steps_; }
  const Communicator& ranks() const { return ranks_; }

  // Called on all ranks after the parameter with this number got the same value on all, from a file, say.
  void begin_anew_from(std::size_t parameter);

  // Saves or loads the state under a prefix, as a Trackable does (DiLoCo::trackable). Loading sets the values.
  void save(Archive& archive, const std::string& prefix) const;
  std::function<void()> load(const Archive& archive, const std::string& prefix);

 private:
  // A parameter, and its part of the state: views in its shape. `velocity` is undefined without momentum.
  struct Variable {
    at::Tensor value, anchor, velocity, delta;
  };

  // Consecutive parameters of one part, dtype and device, whose state lies one after the other.
  struct Piece {
    std::vector<Variable> variables;
    at::Tensor anchor, velocity, delta, sent;  // flat; velocity and sent are undefined where they are not used
    std::unique_ptr<EightBitMean> in_8_bits;
  };
  struct Part {
    std::vector<Piece> pieces;
    std::int64_t due = 0;  // meets at steps with this remainder
    Purpose purpose;
    std::optional<Work> work = {};
    std::int64_t ends_at = 0;  // of the work: a number of steps since `meet`
  };

  // The place of a parameter in parts_.
  struct Place {
    std::size_t part, piece, variable;
  };

  static void add_to(std::vector<Piece>& pieces, const at::Tensor& parameter);
  static void set_values(Piece& piece, double mixing);
  void complete(Piece& piece) const;
  void make_eight_bit_mean(Piece& piece) const;
  void end_work();
  void bring_together(double factor);
  void begin(Part& part);
  void end(Part& part, double mixing, double factor = 1);
  void take_state_of(int rank, bool lacks, std::int64_t meetings);
  void move_anchor(Variable& variable) const;
  std::vector<std::pair<std::string, at::Tensor>> shared() const;
  at::Tensor lost() const;
  at::Tensor lost_in(const Archive& archive, const std::string& prefix) const;
  std::vector<at::Tensor> residuals() const;

  const Communicator ranks_;
  const DiLoCoOptions options_;
  const std::string called_;
  std::vector<Part> parts_;
  std::vector<Place> places_;           // [parameter]
  std::int64_t steps_ = 0, since_ = 0;  // in all, and since `meet`
  std::int64_t meetings_ = 0;           // completed here; a part's meeting counts
  bool is_together_ = true;
  bool has_state_;
};

}  // namespace lockstep::gradient
