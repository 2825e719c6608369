#include "gradient/outer_step.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/text.h"
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
                     std::string called)
    : ranks_(std::move(ranks)), options_(options) {
  check(options_);
  const at::NoGradGuard no_grad;
  std::int64_t all = 0, before = 0;
  for (const auto& parameter : parameters) all += parameter.numel();
  for (int part = 0; part < options_.parts; ++part) {
    parts_.push_back({.pieces = {},
                      .due = options_.steps * (part + 1) / options_.parts % options_.steps,
                      .purpose = Purpose(text("part ", part, " of ", called))});
  }
  for (const auto& parameter : parameters) {
    const auto part =
        std::min<std::int64_t>(options_.parts - 1, before * options_.parts / std::max<std::int64_t>(1, all));
    add_to(parts_[static_cast<std::size_t>(part)].pieces, parameter);
    before += parameter.numel();
  }
  for (auto& part : parts_) {
    for (auto& piece : part.pieces) complete(piece);
  }
}

OuterStep::~OuterStep() {
  for (auto& part : parts_) {
    try {
      if (part.work) part.work->wait();
    } catch (const Error&) {
    }
  }
}

void OuterStep::add_to(std::vector<Piece>& pieces, const at::Tensor& parameter) {
  const auto fits = [&](const at::Tensor& first) {
    return first.scalar_type() == parameter.scalar_type() && first.device() == parameter.device();
  };
  if (pieces.empty() || !fits(pieces.back().parameters[0])) pieces.emplace_back();
  pieces.back().parameters.push_back(parameter);
}

// Makes the piece's state, from its parameters' values.
void OuterStep::complete(Piece& piece) const {
  std::vector<at::Tensor> flat;
  for (const auto& parameter : piece.parameters) flat.push_back(parameter.detach().reshape({-1}));
  piece.anchor = at::cat(flat);
  piece.delta = at::empty_like(piece.anchor);
  if (options_.momentum > 0) piece.velocity = at::zeros_like(piece.anchor);
  if (!options_.dtype || piece.anchor.scalar_type() != at::kFloat) return;
  if (options_.dtype == DType::int8) {
    piece.in_8_bits =
        std::make_unique<EightBitMean>(ranks_.rank(), piece.anchor.numel(), ranks_.size(), piece.anchor.device());
  } else {
    piece.sent = at::empty_like(piece.anchor, at::TensorOptions(at::kBFloat16));
  }
}

bool OuterStep::step() {
  ++steps_;
  is_together_ = false;
  bool changed = false;
  for (auto& part : parts_) {
    if (part.work && steps_ == part.ends_at) {
      end(part, options_.mixing);
      changed = true;
    }
    if (steps_ % options_.steps != part.due) continue;
    begin(part);
    if (options_.overlap > 0) continue;
    end(part, /*mixing=*/0);
    changed = true;
  }
  is_together_ = changed && parts_.size() == 1 && options_.overlap == 0;
  return changed;
}

void OuterStep::meet() {
  if (is_together_) return;
  for (auto& part : parts_) {
    if (part.work) end(part, options_.mixing);
  }
  for (auto& part : parts_) begin(part);
  for (auto& part : parts_) end(part, /*mixing=*/0);
  is_together_ = true;
}

void OuterStep::begin(Part& part) {
  const at::NoGradGuard no_grad;
  for (auto& piece : part.pieces) {
    std::int64_t at = 0;
    for (const auto& parameter : piece.parameters) {
      const auto flat = parameter.reshape({-1});
      auto delta = piece.delta.narrow(0, at, flat.numel());
      at::sub_out(delta, piece.anchor.narrow(0, at, flat.numel()), flat);
      at += flat.numel();
    }
    if (piece.sent.defined()) piece.sent.copy_(piece.delta);
  }
  part.ends_at = steps_ + options_.overlap;
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

// `mixing`: how much of this rank's own values stays.
void OuterStep::end(Part& part, double mixing) {
  const at::NoGradGuard no_grad;
  if (part.work) part.work->wait();
  part.work.reset();
  for (auto& piece : part.pieces) {
    if (piece.velocity.defined()) {
      piece.velocity.mul_(options_.momentum).add_(piece.delta);
      piece.delta.add_(piece.velocity, options_.momentum);
    }
    piece.anchor.sub_(piece.delta, options_.learning_rate);
    std::int64_t at = 0;
    for (auto& parameter : piece.parameters) {
      const auto value = piece.anchor.narrow(0, at, parameter.numel()).view(parameter.sizes());
      at += parameter.numel();
      if (mixing == 0) {
        parameter.copy_(value);
      } else {
        parameter.mul_(mixing).add_(value, 1 - mixing);
      }
    }
  }
}

std::vector<at::Tensor> OuterStep::shared() const {
  std::vector<at::Tensor> tensors;
  for (const auto& part : parts_) {
    for (const auto& piece : part.pieces) {
      tensors.push_back(piece.anchor);
      if (piece.velocity.defined()) tensors.push_back(piece.velocity);
    }
  }
  return tensors;
}

std::vector<at::Tensor> OuterStep::own() const {
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

void OuterStep::restore(std::int64_t steps) {
  const at::NoGradGuard no_grad;
  for (auto& part : parts_) {
    if (part.work) part.work->wait();
    part.work.reset();
    for (auto& piece : part.pieces) {
      std::int64_t at = 0;
      for (auto& parameter : piece.parameters) {
        parameter.copy_(piece.anchor.narrow(0, at, parameter.numel()).view(parameter.sizes()));
        at += parameter.numel();
      }
    }
  }
  steps_ = steps;
  is_together_ = true;
}

}  // namespace lockstep::gradient
