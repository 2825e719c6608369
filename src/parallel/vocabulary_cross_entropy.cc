// Softmax over classes that lie on several ranks (Shoeybi et al. 2019, section 3). For each example ranks exchange the
// largest logit, the sum of exponentials and the logit at the label, and not all logits.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/text.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "lockstep/parallel/tensor_parallel.h"

namespace lockstep {
namespace {

// True, on the device, of logits that are the same on all ranks, unless they are all one number, as those of a weight
// of zeros are.
Tensor are_whole(const Tensor& own_largest, const Tensor& largest, const Tensor& own_sums, const Tensor& sums,
                 const Tensor& logits, const Communicator& ranks) {
  if (ranks.size() == 1 || logits.numel() == 0) return at::zeros({}, logits.options().dtype(at::kBool));
  const auto is_one_number = own_sums == logits.size(-1);
  const auto is_same = (own_sums * ranks.size() - sums).abs() <= 1e-5 * sums;
  return own_largest.eq(largest).all().logical_and(is_same.all()).logical_and(is_one_number.all().logical_not());
}

// A hash of the labels, in numbers that every floating-point type has exactly: [4], of `options`.
Tensor marks_of(const Tensor& labels, const at::TensorOptions& options) {
  constexpr std::int64_t kOdd = 0x1e3779b97f4a7c15, kOther = 0x3f58476d1ce4e5b9;  // products are modulo 2^64
  auto mixed = (labels + 1) * (at::arange(1, labels.numel() + 1, labels.options()) * kOdd);
  mixed = mixed.bitwise_xor(mixed.bitwise_right_shift(29)) * kOther;
  const auto shifts = at::arange(24, 56, 8, labels.options());
  return mixed.sum().bitwise_right_shift(shifts).bitwise_and(255).to(options);
}

// True, on the device, where ranks have other labels. `marks`: the largest of the ranks' marks, and of the negated
// ones.
Tensor differ(const Tensor& marks) {
  const auto half = marks.numel() / 2;
  return marks.narrow(0, 0, half).ne(-marks.narrow(0, half, half)).any();
}

template <class... What>
[[noreturn]] void refuse(const What&... what) {
  throw InvalidArgument(text("vocabulary_parallel_cross_entropy: ", what...));
}

// The labels of the ranks' batch.
struct Labels {
  Tensor all;    // [examples]: among all classes
  Tensor wrong;  // [examples]: which are no class
  std::int64_t classes;
};

// Each is true or false on the device, which the host waits for once.
struct Mistakes {
  Tensor wrong_labels, other_labels, whole_logits;

  void check(const Tensor& logits, const Labels& labels, const Communicator& ranks) const {
    const auto read = at::stack({wrong_labels, other_labels, whole_logits}).cpu();
    const auto* const holds = read.const_data_ptr<bool>();
    if (holds[0]) {
      const auto first = labels.all.masked_select(labels.wrong)[0].item<std::int64_t>();
      refuse("the label ", first, " is no class; there are ", labels.classes);
    }
    if (holds[1]) {
      refuse("the labels differ between the ", ranks.size(),
             " ranks that divide the classes: they compute one batch together, so each must give the same");
    }
    if (holds[2]) {
      refuse("the logits, of shape ", logits.sizes(), ", are the same on all ", ranks.size(),
             " ranks, so they are whole; each rank must give its part of the classes, which layers with "
             "ColwiseParallel{.output = Shard{-1}} or RowwiseParallel{.divided_logits = true} make. Use "
             "torch::cross_entropy_loss for whole logits");
    }
  }
};

struct VocabularyCrossEntropy : torch::autograd::Function<VocabularyCrossEntropy> {
  // logits [examples, own classes], labels [examples]: the index among this rank's classes, -1 for another rank's.
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& logits, const Tensor& labels,
                        const Tensor& ignored, const Labels* of_all, const Communicator* ranks) {
    const auto own_largest = logits.amax(-1);
    const auto marks = marks_of(of_all->all, logits.options());
    const auto with_marks = at::cat({own_largest, marks, -marks});
    all_reduce(ranks->group(), with_marks, ReduceOp::max, ranks->deadline());
    // 16 bits hold logits, and no differences of them or sums.
    const auto wide = at::toOpMathType(logits.scalar_type());
    const auto largest = with_marks.narrow(0, 0, own_largest.numel()).to(wide);
    auto softmax = (logits.to(wide) - largest.unsqueeze(-1)).exp_();
    const auto elsewhere = labels < 0;
    const auto at_label =
        logits.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1).to(wide).masked_fill_(elsewhere, 0);
    const auto sums = at::stack({softmax.sum(-1), at_label});
    const auto own_sums = sums[0].clone();
    all_reduce(ranks->group(), sums, ReduceOp::sum, ranks->deadline());
    const Mistakes mistakes{.wrong_labels = of_all->wrong.any(),
                            .other_labels = differ(with_marks.narrow(0, own_largest.numel(), 2 * marks.numel())),
                            .whole_logits = are_whole(own_largest, with_marks.narrow(0, 0, own_largest.numel()),
                                                      own_sums, sums[0], logits, *ranks)};
    mistakes.check(logits, *of_all, *ranks);
    // Softmax less one at the label, which is small where the model is sure: 16 bits hold it only once it is
    // subtracted.
    auto derivative = softmax.div_(sums[0].unsqueeze(-1));
    derivative.scatter_add_(-1, labels.clamp_min(0).unsqueeze(-1), elsewhere.to(wide).sub_(1).unsqueeze(-1));
    context->save_for_backward({derivative.to(logits.scalar_type()), ignored});
    return (sums[0].log() + largest - sums[1]).to(logits.scalar_type()).masked_fill_(ignored, 0);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list& gradients) {
    if (at::GradMode::is_enabled())
      throw InvalidArgument("vocabulary_parallel_cross_entropy cannot be differentiated twice");
    const auto saved = context->get_saved_variables();
    const auto &derivative = saved[0], &ignored = saved[1];
    const auto gradient = gradients[0].masked_fill(ignored, 0).unsqueeze(-1);
    return {derivative * gradient, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

Tensor vocabulary_parallel_cross_entropy(const Tensor& logits, const Tensor& labels, const Communicator& ranks,
                                         std::int64_t ignore_index) {
  if (!logits.is_floating_point() || logits.dim() == 0) refuse("logits must be floating-point [..., classes / ranks]");
  if (labels.scalar_type() != at::kLong) refuse("labels are of ", labels.scalar_type(), "; they must be of int64");
  if (labels.sizes() != logits.sizes().slice(0, static_cast<std::size_t>(logits.dim() - 1)))
    refuse("logits have shape ", logits.sizes(), ", and labels ", labels.sizes());
  const auto own = logits.size(-1), first = own * ranks.rank(), classes = own * ranks.size();
  const auto flat = labels.reshape(-1);
  const auto ignored = flat == ignore_index;
  const auto wrong = (flat < 0).logical_or_(flat >= classes).logical_and_(ignored.logical_not());
  const Labels all{flat, wrong, classes};
  const auto here = (flat >= first).logical_and_(flat < first + own).logical_and_(ignored.logical_not());
  const auto local = (flat - first).masked_fill_(here.logical_not(), -1);
  return VocabularyCrossEntropy::apply(logits.reshape({-1, own}), local, ignored, &all, &ranks).view(labels.sizes());
}

}  // namespace lockstep
