#include "gradient/outer_step.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/text.h"
#include "checkpoint/state.h"
#include "data/stored_tensor.h"
#include "lockstep/base/error.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "ops/tensors.h"

namespace lockstep::gradient {

void check(const DiLoCoOptions& options) {
  require(options.steps >= 1, "DiLoCo: steps", options.steps, "1 or more");
  require(options.learning_rate > 0, "DiLoCo: learning_rate", options.learning_rate, "above 0");
  require(options.momentum >= 0 && options.momentum < 1, "DiLoCo: momentum", options.momentum, "from 0 to below 1");
  require(options.parts >= 1 && options.parts <= options.steps, "DiLoCo: parts", options.parts,
          "from 1 to the number of steps");
  require(options.overlap >= 0 && options.overlap < options.steps / options.parts, "DiLoCo: overlap", options.overlap,
          "from 0 to below steps / parts");
  require(options.mixing >= 0 && options.mixing < 1, "DiLoCo: mixing", options.mixing, "from 0 to below 1");
  if (options.dtype && options.dtype != DType::bfloat16 && options.dtype != DType::int8) {
    throw InvalidArgument(
        text("DiLoCo: dtype is ", name_of(*options.dtype), "; it must be bfloat16 or int8, or not set"));
  }
}

std::string describe(const DiLoCoOptions& options) {
  return text("steps ", options.steps, "\nlearning_rate ", options.learning_rate, "\nmomentum ", options.momentum,
              "\ndtype ", options.dtype ? name_of(*options.dtype) : "none", "\nparts ", options.parts, "\noverlap ",
              options.overlap, "\nmixing ", options.mixing, "\n");
}

OuterStep::OuterStep(const std::vector<at::Tensor>& parameters, Communicator ranks, DiLoCoOptions options,
                     std::string called, bool has_state)
    : ranks_(std::move(ranks)), options_(options), called_(std::move(called)), has_state_(has_state) {
  check(options_);
  const at::NoGradGuard no_grad;
  std::int64_t all = 0, before = 0;
  for (const auto& parameter : parameters) all += parameter.numel();
  for (int part = 0; part < options_.parts; ++part) {
    parts_.push_back({.pieces = {},
                      .due = options_.steps * (part + 1) / options_.parts % options_.steps,
                      .purpose = Purpose(text("part ", part, " of ", called_))});
  }
  for (const auto& parameter : parameters) {
    const auto part =
        std::min<std::int64_t>(options_.parts - 1, before * options_.parts / std::max<std::int64_t>(1, all));
    auto& pieces = parts_[static_cast<std::size_t>(part)].pieces;
    add_to(pieces, parameter);
    places_.push_back({static_cast<std::size_t>(part), pieces.size() - 1, pieces.back().variables.size() - 1});
    before += parameter.numel();
  }
  for (auto& part : parts_) {
    for (auto& piece : part.pieces) complete(piece);
  }
}

OuterStep::~OuterStep() { end_work(); }

// Ends exchanges, whose results are not used.
void OuterStep::end_work() {
  for (auto& part : parts_) {
    try {
      if (part.work) part.work->wait();
    } catch (const Error&) {
    }
    part.work.reset();
  }
}

void OuterStep::add_to(std::vector<Piece>& pieces, const at::Tensor& parameter) {
  const auto fits = [&](const at::Tensor& first) {
    return first.scalar_type() == parameter.scalar_type() && first.device() == parameter.device();
  };
  if (pieces.empty() || !fits(pieces.back().variables[0].value)) pieces.emplace_back();
  pieces.back().variables.push_back({.value = parameter});
}

// Makes the piece's state, from its parameters' values.
void OuterStep::complete(Piece& piece) const {
  std::vector<at::Tensor> flat;
  for (const auto& variable : piece.variables) flat.push_back(variable.value.detach().reshape({-1}));
  piece.anchor = at::cat(flat);
  piece.delta = at::empty_like(piece.anchor);
  if (options_.momentum > 0) piece.velocity = at::zeros_like(piece.anchor);
  std::int64_t begin = 0;
  for (auto& variable : piece.variables) {
    const auto& value = variable.value;
    const auto view = [&](const at::Tensor& all) {
      return all.defined() ? all.narrow(0, begin, value.numel()).view(value.sizes()) : all;
    };
    variable = {value, view(piece.anchor), view(piece.velocity), view(piece.delta)};
    begin += value.numel();
  }
  if (!options_.dtype || piece.anchor.scalar_type() != at::kFloat) return;
  if (options_.dtype == DType::int8) {
    make_eight_bit_mean(piece);
  } else {
    piece.sent = at::empty_like(piece.anchor, at::TensorOptions(at::kBFloat16));
  }
}

void OuterStep::make_eight_bit_mean(Piece& piece) const {
  piece.in_8_bits =
      std::make_unique<EightBitMean>(ranks_.rank(), piece.anchor.numel(), ranks_.size(), piece.anchor.device());
}

bool OuterStep::advance() {
  ++steps_;
  ++since_;
  is_together_ = false;
  bool changed = false;
  for (auto& part : parts_) {
    if (part.work && since_ == part.ends_at) {
      end(part, options_.mixing);
      changed = true;
    }
    if (since_ % options_.steps != part.due) continue;
    begin(part);
    if (options_.overlap > 0) continue;
    end(part, /*mixing=*/0);
    changed = true;
  }
  is_together_ = changed && parts_.size() == 1 && options_.overlap == 0;
  return changed;
}

void OuterStep::come_together() {
  if (is_together_) return;
  for (auto& part : parts_) {
    if (part.work) end(part, options_.mixing);
  }
  bring_together(/*factor=*/1);
}

void OuterStep::bring_together(double factor) {
  for (auto& part : parts_) begin(part);
  for (auto& part : parts_) end(part, /*mixing=*/0, factor);
  is_together_ = true;
}

void OuterStep::begin(Part& part) {
  const at::NoGradGuard no_grad;
  for (auto& piece : part.pieces) {
    for (auto& variable : piece.variables) at::sub_out(variable.delta, variable.anchor, variable.value);
    if (piece.sent.defined()) piece.sent.copy_(piece.delta);
  }
  part.ends_at = since_ + options_.overlap;
  if (part.pieces.empty()) return;
  const auto device = buffer_of(part.pieces[0].delta).device;
  const auto average = [&part](const Group::RunCalls& run) {
    const at::NoGradGuard no_grad_here;
    for (auto& piece : part.pieces) {
      const auto run_described = [&](std::vector<Call> calls) {
        for (auto& call : calls) {
          call = on_stream_of(piece.delta, call);
          call.purpose = part.purpose;
        }
        run(calls);
      };
      if (piece.in_8_bits) {
        piece.in_8_bits->reduce(piece.delta, /*gathers=*/true, run_described);
        continue;
      }
      const auto& sent = piece.sent.defined() ? piece.sent : piece.delta;
      run_described({Call::all_reduce(buffer_of(sent), ReduceOp::mean)});
      if (piece.sent.defined()) piece.delta.copy_(piece.sent);
    }
  };
  part.work = ranks_.group().start(average, device, ranks_.deadline());
}

// `factor`: of the mean over all ranks.
void OuterStep::end(Part& part, double mixing, double factor) {
  const at::NoGradGuard no_grad;
  if (part.work) part.work->wait();
  part.work.reset();
  // An exchange on a GPU may have failed: what was received has no meaning then, and must not be used.
  if (!part.pieces.empty() && part.pieces[0].delta.is_cuda()) ranks_.group().synchronize(ranks_.deadline());
  for (auto& piece : part.pieces) {
    if (factor != 1) piece.delta.mul_(factor);
    for (auto& variable : piece.variables) move_anchor(variable);
    set_values(piece, mixing);
  }
  ++meetings_;
}

void OuterStep::move_anchor(Variable& variable) const {
  auto& delta = variable.delta;
  if (!delta.any().item<bool>()) return;
  if (variable.velocity.defined()) {
    variable.velocity.mul_(options_.momentum).add_(delta);
    delta.add_(variable.velocity, options_.momentum);
  }
  variable.anchor.sub_(delta, options_.learning_rate);
}

// `mixing`: how much of this rank's own values stays.
void OuterStep::set_values(Piece& piece, double mixing) {
  for (auto& variable : piece.variables) {
    if (mixing == 0) {
      variable.value.copy_(variable.anchor);
    } else {
      variable.value.mul_(mixing).add_(variable.anchor, 1 - mixing);
    }
  }
}

void OuterStep::begin_anew_from(std::size_t parameter) {
  const at::NoGradGuard no_grad;
  const auto& place = places_[parameter];
  auto& part = parts_[place.part];
  auto& variable = part.pieces[place.piece].variables[place.variable];
  if (part.work) part.work->wait();  // its result is from another value
  variable.anchor.copy_(variable.value);
  variable.delta.zero_();
}

// --- the state in a file

namespace {

using checkpoint::joined;

// Returns the archive's tensor. Throws where it has not the shape and the dtype of `like`.
at::Tensor load_like(const Archive& archive, const std::string& name, const at::Tensor& like) {
  const auto loaded = data::from_stored(archive.tensor(name));
  if (loaded.sizes() == like.sizes() && loaded.scalar_type() == like.scalar_type()) return loaded;
  throw InvalidArgument(text("the checkpoint's ", name, " is ", loaded.scalar_type(), " ", loaded.sizes(),
                             "; here it is ", like.scalar_type(), " ", like.sizes()));
}

}  // namespace

// Anchors, and velocities where there is momentum, by name: the same on all ranks.
std::vector<std::pair<std::string, at::Tensor>> OuterStep::shared() const {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& part : parts_) {
    for (const auto& piece : part.pieces) {
      const auto number = tensors.size();
      tensors.emplace_back(text("anchor", number), piece.anchor);
      if (piece.velocity.defined()) tensors.emplace_back(text("velocity", number), piece.velocity);
    }
  }
  return tensors;
}

std::vector<at::Tensor> OuterStep::residuals() const {
  std::vector<at::Tensor> tensors;
  for (const auto& part : parts_) {
    for (const auto& piece : part.pieces) {
      if (!piece.in_8_bits) continue;
      const auto& lost = piece.in_8_bits->residuals();
      tensors.insert(tensors.end(), lost.begin(), lost.end());
    }
  }
  return tensors;
}

// The losses by rounding on this rank: flat, in host memory.
at::Tensor OuterStep::lost() const {
  std::vector<at::Tensor> flat{at::empty({0})};
  for (const auto& tensor : residuals()) flat.push_back(tensor.cpu().view({-1}));
  return at::cat(flat);
}

void OuterStep::require_together() const {
  if (is_together_) return;
  const auto left = options_.steps - since_ % options_.steps;
  throw InvalidArgument(
      text("between two meetings ", called_, " differ from rank to rank, and cannot be saved or evaluated: ",
           parts_.size() == 1 && options_.overlap == 0 ? text("the next meeting is in ", left, " steps; ") : "",
           "meet(), and the end of an epoch of fit, make one"));
}

void OuterStep::save(Archive& archive, const std::string& prefix) const {
  require_together();
  archive.entries[joined(prefix, "steps")] = std::to_string(steps_);
  archive.entries[joined(prefix, "momentum")] = text(options_.momentum);
  archive.entries[joined(prefix, "parts")] = std::to_string(options_.parts);
  for (const auto& [name, tensor] : shared()) archive.tensors[joined(prefix, name)] = data::to_stored(tensor);
  const auto& group = ranks_.group();
  const auto mine = lost();
  const auto sizes = all_gather(group, at::full({1}, mine.numel(), at::kLong), ranks_.deadline());
  archive.tensors[joined(prefix, "lost_sizes")] = data::to_stored(sizes);
  archive.tensors[joined(prefix, "lost")] = data::to_stored(all_gather(group, mine, ranks_.deadline()));
}

std::function<void()> OuterStep::load(const Archive& archive, const std::string& prefix) {
  const auto steps = archive.integer(joined(prefix, "steps"));
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to, from
  const auto same = [&](const char* option, const std::string& here) {
    const auto& there = archive.entry(joined(prefix, option));
    if (there == here) return;
    throw InvalidArgument(text("the checkpoint is of a DiLoCo whose ", option, " is ", there, "; here it is ", here));
  };
  same("momentum", text(options_.momentum));
  same("parts", std::to_string(options_.parts));
  for (const auto& [name, tensor] : shared())
    copies.emplace_back(tensor, load_like(archive, joined(prefix, name), tensor));
  const auto lost = lost_in(archive, prefix);
  return [this, steps, copies, lost] {
    const at::NoGradGuard no_grad;
    for (auto& part : parts_) {
      if (part.work) part.work->wait();
      part.work.reset();
    }
    for (const auto& [to, from] : copies) to.copy_(from);
    std::int64_t at = 0;
    for (auto& tensor : residuals()) {
      tensor.copy_(lost.narrow(0, at, tensor.numel()).view(tensor.sizes()));
      at += tensor.numel();
    }
    for (auto& part : parts_) {
      for (auto& piece : part.pieces) set_values(piece, /*mixing=*/0);
    }
    steps_ = steps;
    since_ = 0;
    is_together_ = true;
  };
}

// This rank's part of what was lost; zeros where there were other ranks.
at::Tensor OuterStep::lost_in(const Archive& archive, const std::string& prefix) const {
  const auto mine = lost();
  const auto all = data::from_stored(archive.tensor(joined(prefix, "lost")));
  const auto sizes = data::from_stored(archive.tensor(joined(prefix, "lost_sizes")));
  const auto rank = ranks_.rank();
  if (sizes.numel() != ranks_.size() || sizes[rank].item<std::int64_t>() != mine.numel()) return at::zeros_like(mine);
  return all.narrow(0, sizes.narrow(0, 0, rank).sum().item<std::int64_t>(), mine.numel());
}

}  // namespace lockstep::gradient
