#include "parallel/divided_parameter.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <unordered_set>

#include "base/text.h"
#include "parallel/equal_gradients.h"
#include "parallel/exchange.h"

namespace lockstep::parallel {
namespace {

using ops::ArgumentPlace;
using ops::OperatorCall;
using Names = std::unordered_set<std::string_view>;

// Names are of LibTorch's operators: an operator of somebody else may have an equal name.
bool has(const Names& names, const OperatorCall& call) {
  constexpr std::string_view kLibTorch = "aten::";
  const std::string_view name = call.name();
  return name.substr(0, kLibTorch.size()) == kLibTorch && names.contains(name.substr(kLibTorch.size()));
}

bool begins_with(const OperatorCall& call, std::string_view name) { return call.name().rfind(name, 0) == 0; }

// Operators that read no values. Their results have the part's shape.
bool reads_no_values(const OperatorCall& call, const ArgumentPlace& place) {
  static const Names of_shapes{"_has_compatible_shallow_copy_type",
                               "set_",
                               "set_data",
                               "data",
                               "requires_grad_",
                               "retain_grad",
                               "is_leaf",
                               "output_nr",
                               "_version",
                               "record_stream",
                               "size",
                               "stride",
                               "storage_offset",
                               "is_same_size",
                               "is_set_to",
                               "is_pinned",
                               "is_floating_point",
                               "is_complex",
                               "is_signed",
                               "is_inference",
                               "result_type",
                               "can_cast",
                               "sym_size",
                               "sym_stride",
                               "sym_numel",
                               "sym_storage_offset",
                               "empty_like",
                               "zeros_like",
                               "ones_like",
                               "full_like",
                               "new_empty",
                               "new_empty_strided",
                               "new_zeros",
                               "new_ones",
                               "new_full"};
  static const Names of_others_like_it{"to", "type_as"};
  return has(of_shapes, call) || (place.index > 0 && has(of_others_like_it, call));
}

// Views that keep the divided dimension.
bool is_plain_view(const OperatorCall& call) {
  static const Names views{"alias",    "detach",  "detach_", "t",        "transpose", "permute",  "movedim",
                           "moveaxis", "numpy_T", "mT",      "swapaxes", "swapdims",  "unsqueeze"};
  return has(views, call);
}

// Copies of parts are parts.
bool is_copy(const OperatorCall& call) {
  static const Names copies{"to", "clone", "contiguous", "type_as", "pin_memory", "_to_copy"};
  return has(copies, call);
}

// `others`: beside those that LibTorch calls pointwise.
bool is_elementwise(const OperatorCall& call) {
  static const Names others{"copy_",  "fill_",       "zero_", "masked_fill_", "masked_fill", "lerp_", "lerp",
                            "clamp_", "nan_to_num_", "equal", "allclose",     "isclose",     "relu_", "hardtanh_"};
  return call.is_pointwise() || has(others, call) || begins_with(call, "aten::_foreach_");
}

bool is_reduction(const OperatorCall& call) {
  static const Names reductions{"norm",
                                "linalg_norm",
                                "linalg_vector_norm",
                                "linalg_matrix_norm",
                                "frobenius_norm",
                                "nuclear_norm",
                                "sum",
                                "nansum",
                                "mean",
                                "nanmean",
                                "prod",
                                "max",
                                "min",
                                "amax",
                                "amin",
                                "aminmax",
                                "std",
                                "var",
                                "std_mean",
                                "var_mean",
                                "logsumexp",
                                "median",
                                "all",
                                "any",
                                "argmax",
                                "argmin",
                                "count_nonzero"};
  return has(reductions, call);
}

bool draws(const OperatorCall& call) {
  return begins_with(call, "aten::rand") || call.schema().argumentIndexWithName("generator").has_value();
}

// True for a number that the program wrote. A scalar tensor of the program is none: results with it are whole, trained
// or not.
bool is_number(const Tensor& tensor) {
  return !tensor.defined() || (tensor.dim() == 0 && tensor.unsafeGetTensorImpl()->is_wrapped_number());
}

// True where the operator takes another tensor than a number, parameters among them.
bool has_other_operands(const OperatorCall& call, const ArgumentPlace& place) {
  for (std::size_t i = 0; i < call.arguments(); ++i) {
    if (i == place.index) continue;
    if (call.argument(i).isTensorList() || !is_number(call.tensor(i))) return true;
  }
  return place.element.has_value();
}

bool returns_one_tensor(const OperatorCall& call) {
  const auto& returns = call.schema().returns();
  return returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::TensorType;
}

class OtherOperator {
 public:
  OtherOperator(const DividedParameter& parameter, const OperatorCall& call, const ArgumentPlace& place)
      : parameter_(parameter),
        call_(call),
        place_(place),
        value_(call.tensor(place)),
        dim_(parameter.divided_dim(value_)) {}

  bool run_on_whole() const {
    if (gives_shape()) return false;
    if (call_.writes(place_.index)) return write();
    if (draws(call_) && begins_with(call_, "aten::rand")) refuse_draws();
    if (is_plain_view(call_) || is_view_of_other_dimensions()) return false;
    if (copies_other_order()) {
      take_whole();
      return false;
    }
    if (keeps_hooks(call_, place_)) return true;
    if (is_elementwise(call_) && writes_part()) return false;
    if (is_elementwise(call_) && any_other([&](const Tensor& other) { return other.sizes() == value_.sizes(); })) {
      if (is_trained()) refuse("beside a tensor of the part's shape: the other operand must have the whole's");
      return false;  // optimizers make such calls
    }
    check_sizes_in_arguments();
    take_whole();
    return false;
  }

  bool run_on_part() const {
    if (call_.writes(place_.index) || is_plain_view(call_)) return false;
    if (is_reduction(call_) && !has_other_operands(call_, place_)) {
      if (reduces_divided_dim()) take_whole();
      return false;
    }
    if (copies_other_order()) {
      take_whole();
      return false;
    }
    return keeps_hooks(call_, place_);
  }

 private:
  // True where the result has other strides, by which the divided dimension is found: as of w.t().contiguous().
  bool copies_other_order() const { return is_copy(call_) && place_.index == 0 && !value_.is_contiguous(); }

  bool is_trained() const { return at::GradMode::is_enabled() && value_.requires_grad(); }

  // True where the operator takes only the argument's shape, for another tensor. Where the other tensor is not of the
  // part, the operator gets the shape of the whole.
  bool gives_shape() const {
    static const Names like_it{"view_as", "reshape_as", "expand_as"};
    if (place_.index != 1 || !has(like_it, call_)) return false;
    const auto other = call_.tensor(0);
    if (!dim_ || (call_.name() == "aten::expand_as" ? is_part_of_it(other) : other.numel() == value_.numel()))
      return true;
    auto sizes = value_.sizes().vec();
    sizes[static_cast<std::size_t>(*dim_)] *= parameter_.ranks().size();
    call_.replace(place_, at::empty({}, other.options()).expand(sizes));
    return true;
  }

  bool is_part_of_it(const Tensor& other) const {
    const auto dim = *dim_ - (value_.dim() - other.dim());
    return dim >= 0 && other.size(dim) == value_.size(*dim_);
  }

  // True where the result goes into a tensor of the part's shape.
  bool writes_part() const {
    for (std::size_t i = 0; i < call_.arguments(); ++i) {
      if (i != place_.index && call_.writes(i) && call_.tensor(i).sizes() == value_.sizes()) return true;
    }
    return false;
  }

  // True where an operand meets the condition that is neither a parameter with hooks nor a number.
  template <class Condition>
  bool any_other(const Condition& condition) const {
    for (std::size_t i = 0; i < call_.arguments(); ++i) {
      const auto& argument = call_.argument(i);
      if (argument.isTensorList() && i != place_.index) {
        for (const auto& each : argument.toTensorVector()) {
          if (is_other(each) && condition(each)) return true;
        }
      }
      if (i != place_.index && is_other(call_.tensor(i)) && condition(call_.tensor(i))) return true;
    }
    return false;
  }

  static bool is_other(const Tensor& tensor) { return !is_number(tensor) && ops::hooks_of(tensor).empty(); }

  // Views, such as slices, along another dimension than the divided one.
  bool is_view_of_other_dimensions() const {
    static const Names views{"slice",        "select", "narrow", "split",    "split_with_sizes",
                             "tensor_split", "chunk",  "unbind", "unflatten"};
    if (!has(views, call_)) return false;
    const auto dim = call_.named("dim");
    return dim && dim->isInt() && dim_ && wrapped(dim->toInt()) != *dim_;
  }

  std::int64_t wrapped(std::int64_t dim) const { return dim < 0 ? dim + value_.dim() : dim; }

  // Numbers that count along the divided dimension may be of the part, whose size the module sees, or of the whole.
  void check_sizes_in_arguments() const {
    static const Names counts{"slice",        "select",    "narrow",     "split", "split_with_sizes",
                              "tensor_split", "unflatten", "as_strided", "unfold"};
    if (has(counts, call_) && !is_full_slice()) {
      refuse("along the divided dimension, whose positions this rank has a part of");
    }
    static const Names reshapes{"view", "reshape", "_unsafe_view", "_reshape_alias"};
    if (!has(reshapes, call_)) return;
    const auto sizes = call_.argument(1);
    if (!sizes.isIntList()) return;
    for (const auto size : sizes.toIntVector()) {
      if (size != 1 && size != -1 && !is_size_of_whole(size))
        refuse(text("to sizes ", at::IntArrayRef(sizes.toIntVector()), ", which may be of the part: use -1"));
    }
  }

  bool is_full_slice() const {
    if (call_.name() != "aten::slice") return false;
    const auto start = call_.argument(2), end = call_.argument(3);
    return (start.isNone() || start.toInt() == 0) &&
           (end.isNone() || end.toInt() == std::numeric_limits<std::int64_t>::max());
  }

  bool is_size_of_whole(std::int64_t size) const {
    if (!dim_) return false;
    const auto part = value_.size(*dim_);
    if (size == part) return false;
    const auto sizes = value_.sizes();
    return size == part * parameter_.ranks().size() || std::ranges::find(sizes, size) != sizes.end();
  }

  bool reduces_divided_dim() const {
    const auto dim = call_.named("dim");
    if (!dim || dim->isNone() || !dim_) return true;
    if (dim->isInt()) return wrapped(dim->toInt()) == *dim_;
    if (!dim->isIntList()) return true;
    const auto dims = dim->toIntVector();
    return dims.empty() || std::ranges::any_of(dims, [&](auto d) { return wrapped(d) == *dim_; });
  }

  void take_whole() const {
    if (!dim_) refuse("through a view in which the divided dimension cannot be found");
    parameter_.warn_of_gathering(call_.name());
    auto whole = parameter_.whole_for_all(value_, *dim_);
    if (whole.requires_grad()) {
      whole.register_hook(
          [name = parameter_.name(), op = call_.name(), ranks = parameter_.ranks()](const Tensor& gradient) {
            check_equal_gradients(gradient, ranks, text("of ", name, ", which ", op, " takes whole,"));
          });
    }
    call_.replace(place_, std::move(whole));
  }

  // Carries out an operator in place, and divides operands that are whole for it.
  bool write() const {
    if (draws(call_)) refuse_draws();
    if (begins_with(call_, "aten::_foreach_") || begins_with(call_, "aten::_fused_")) return false;
    if (is_elementwise(call_)) {
      for (std::size_t i = 0; i < call_.arguments(); ++i) {
        const auto other = call_.tensor(i);
        if (i != place_.index && is_other(other)) call_.argument(i) = part_beside_value(other);
      }
      return false;
    }
    if (is_trained()) return false;  // LibTorch refuses that for a leaf
    const auto& returns = call_.schema().returns();
    const bool returns_it = returns.size() == 1 && returns[0].alias_info() != nullptr && place_.index == 0;
    if (!dim_ || !returns_it || place_.element) refuse("in place");
    parameter_.warn_of_gathering(call_.name());
    const auto part = value_;
    call_.replace(place_, parameter_.whole_for_all(part, *dim_));
    call_.again();
    part.copy_(parameter_.part_along(call_.result(), *dim_));
    call_.set_result(part);
    return true;
  }

  Tensor part_beside_value(const Tensor& other) const {
    if (!dim_) {
      if (other.sizes() != value_.sizes()) refuse("through a view in which the divided dimension cannot be found");
      return other;
    }
    const auto dim = *dim_ - (value_.dim() - other.dim());
    const auto part = value_.size(*dim_);
    if (dim < 0 || other.size(dim) != part * parameter_.ranks().size()) return other;
    return parameter_.part_along(other, dim);
  }

  [[noreturn]] void refuse_draws() const {
    refuse(
        "which draws random numbers: each rank would draw others than one process does. Do it before "
        "parallelize_module");
  }

  [[noreturn]] void refuse(const std::string& how) const {
    throw InvalidArgument(text(call_.name(), " of ", parameter_.name(), ", of which this rank of ",
                               parameter_.ranks().size(), " has a part, ", parameter_.style(), ", ", how,
                               ". Its value there has shape ", value_.sizes(),
                               ". Allowed are the layer's own operators, embedding and linear with it, elementwise "
                               "operators, and those that take the whole; full_tensor(parameter) gives the whole "
                               "value, to print it or to read a part; or leave ",
                               parameter_.name(), " out of the plan"));
  }

  const DividedParameter& parameter_;
  const OperatorCall& call_;
  const ArgumentPlace& place_;
  const Tensor value_;
  const std::optional<std::int64_t> dim_;
};

}  // namespace

bool run_other_operator(const DividedParameter& parameter, OtherOperators see, const OperatorCall& call,
                        const ArgumentPlace& place) {
  if (parameter.ranks().size() == 1 || reads_no_values(call, place) || ops::hooks_of(call.tensor(place)).empty())
    return false;
  const OtherOperator other(parameter, call, place);
  return see == OtherOperators::on_whole ? other.run_on_whole() : other.run_on_part();
}

bool is_of_it_alone(const ops::OperatorCall& call, const ops::ArgumentPlace& place) {
  const bool is_made_of_it = is_reduction(call) || (call.is_pointwise() && !draws(call) && returns_one_tensor(call));
  return (is_made_of_it && !has_other_operands(call, place)) || (is_copy(call) && place.index == 0);
}

bool keeps_hooks(const ops::OperatorCall& call, const ops::ArgumentPlace& place) {
  if (is_reduction(call) || call.writes(place.index) || !is_of_it_alone(call, place)) return false;
  const auto argument = call.tensor(place);
  const auto hooks = ops::hooks_of(argument);
  call.again();
  const auto result = call.result();
  if (result.is_same(argument) || !ops::hooks_of(result).empty()) return true;
  for (const auto& hook : hooks) {
    const bool is_of_style = std::dynamic_pointer_cast<DividedParameter>(hook) != nullptr ||
                             std::dynamic_pointer_cast<SequencePart>(hook) != nullptr;
    if (is_of_style) ops::add_hook(result, hook);
  }
  return true;
}

bool is_part_of_outputs(const OperatorCall& call, const Tensor& part) {
  if (!call.is_pointwise()) return false;
  for (std::size_t i = 0; i < call.arguments(); ++i) {
    const auto other = call.tensor(i);
    if (other.defined() && other.dim() > 1 && other.size(-1) == part.numel()) return true;
  }
  return false;
}

}  // namespace lockstep::parallel
