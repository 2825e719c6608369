#include "tpu/trace.h"

#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/ones.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <thread>

#include "base/text.h"
#include "lockstep/base/device_error.h"
#include "ops/tensors.h"
#include "tpu/call.h"

namespace lockstep::tpu {

namespace {

constexpr auto kAutocastKey = c10::DispatchKey::AutocastPrivateUse1;

// LibTorch's lists of which operators compute in which precision (autocast), for the device of traced steps. Once. The
// macros register with a library that is called `m`.
void register_autocast() {
  using namespace at::autocast;  // NOLINT: whose names the macros use
  static torch::Library others(torch::Library::IMPL, "_", kAutocastKey, __FILE__, __LINE__);
  if (!c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(kAutocastKey))
    others.fallback(torch::CppFunction::makeFallthrough());
  static torch::Library m(torch::Library::IMPL, "aten", kAutocastKey, __FILE__, __LINE__);
#define LOCKSTEP_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOCKSTEP_LOWER_PRECISION)
#undef LOCKSTEP_LOWER_PRECISION
#define LOCKSTEP_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(LOCKSTEP_FP32)
#undef LOCKSTEP_FP32
#define LOCKSTEP_FP32_BY_OPTION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(LOCKSTEP_FP32_BY_OPTION)
#undef LOCKSTEP_FP32_BY_OPTION
#define LOCKSTEP_PROMOTED(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(LOCKSTEP_PROMOTED)
#undef LOCKSTEP_PROMOTED
}

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr const char* kTaken = "another library has taken LibTorch's device type PrivateUse1, which traced steps need";

std::atomic<std::thread::id> tracing_thread;  // none: no Trace lives
Trace* current = nullptr;                     // that lives, for its thread and autograd's
std::atomic<std::int64_t> traces = 0;

// True once a Trace was made: until then a process has no such device.
std::atomic<bool> is_used = false;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
};

// Registered when the library is loaded: when the process's first backward comes, autograd asks how many devices there
// are, and starts a thread for each. In a process without a Trace there is none, and no thread, so that it may fork.
// There is one device, on which all that happens is that a program is written.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device of) const override { return c10::Stream(c10::Stream::DEFAULT, of); }
  c10::Stream getDefaultStream(c10::Device of) const override { return getStream(of); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return is_used ? 1 : 0; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
};

std::atomic<const c10::impl::DeviceGuardImplInterface*>& registered_guard() {
  return c10::impl::device_guard_impl_registry[static_cast<std::size_t>(kType)];
}

// Null where another library has registered before.
const Guard* const guard = [] {
  static Guard ours;
  if (registered_guard().load() != nullptr) return static_cast<Guard*>(nullptr);
  registered_guard() = &ours;
  return &ours;
}();

// Composed operators of LibTorch, such as rot90, call these to change how their tensors are seen. LibTorch's own would
// change a tensor's sizes and leave its value as it was.
constexpr const char* kViewsInPlace[] = {"aten::t_",           "aten::transpose_",    "aten::squeeze_",
                                         "aten::squeeze_.dim", "aten::squeeze_.dims", "aten::unsqueeze_",
                                         "aten::as_strided_"};

// Finds the operator's own lowering. Inside functionalization LibTorch's composed operators call others in place, and
// with an argument `out`. Their lowering is that of the operator without either; the arguments are the same.
const Lowerings::value_type* lowering_of(const std::string& name) {
  const auto find = [](const std::string& other) {
    const auto found = lowerings().find(other);
    return found == lowerings().end() ? nullptr : &*found;
  };
  if (const auto* const own = find(name)) return own;
  const auto dot = std::min(name.find('.'), name.size());
  const auto base = name.substr(0, dot), overload = name.substr(std::min(dot + 1, name.size()));
  if (base == "aten::transpose_") return find("aten::transpose.int");
  if (base == "aten::normal_") return find("aten::normal_functional");
  if (base == "aten::bernoulli_" && overload == "float") return find("aten::bernoulli.p");
  if (base.ends_with("_")) return find(base.substr(0, base.size() - 1) + name.substr(dot));
  if (!overload.ends_with("out")) return nullptr;
  if (overload == "start_out") return find(base + ".start_step");
  if (overload != "out") return find(text(base, ".", overload.substr(0, overload.size() - 4)));
  const auto* const plain = find(base);
  return plain != nullptr ? plain : find(base + ".Tensor");
}

void record(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  if (current == nullptr)
    throw Error(text(name_of_operator(operation),
                     " on a tensor of the device \"tpu\": it has a value only while a step is traced"));
  const auto refusal = refusal_of(operation, torch::jit::last(*stack, operation.schema().arguments().size()));
  Call call(*current, operation, *stack);
  if (!refusal.empty()) call.refuse_arguments(refusal);
  const auto lowering = lowering_of(call.name());
  if (lowering == nullptr) call.refuse_unknown();
  if (call.writes_several()) call.refuse("it writes into several arguments");
  lowering->second(call);
  call.push_results(lowering->first);
}

// Acts once. An operator that LibTorch makes of others may have no lowering. Each that has one is registered by itself,
// since LibTorch would prefer its own composition to a fallback.
void register_device() {
  static const bool registered = [] {
    is_used = true;
    // Else functionalization runs each in-place operator on meta tensors as well, for which not all have kernels. It
    // reads this when it is first used; torch_xla sets it too.
    ::setenv("TORCH_DISABLE_FUNCTIONALIZATION_META_REFERENCE", "1", /*overwrite=*/1);
    try {
      if (guard == nullptr || registered_guard().load() != guard) throw DeviceError(kTaken);
      c10::register_privateuse1_backend("tpu");
      at::RegisterPrivateUse1HooksInterface(new Hooks);
    } catch (const c10::Error& error) {
      throw DeviceError(text(kTaken, ": ", error.what_without_backtrace()));
    }
    static torch::Library others(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    others.fallback(torch::CppFunction::makeFromBoxedFunction<&record>());
    static torch::Library operators(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    for (const auto& [name, lowering] : lowerings())
      operators.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&record>());
    for (const char* const name : kViewsInPlace)
      operators.impl(name, torch::CppFunction::makeFromBoxedFunction<&record>());
    register_autocast();
    return true;
  }();
  (void)registered;
}

// True where autograd, which starts its threads with the process's first backward, has one for the device.
bool has_backward() {
  try {
    const at::AutoGradMode with_gradients(true);
    const auto x = at::ones({}, at::TensorOptions().device(device())).requires_grad_();
    x.mul(2).backward();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

at::Device device() { return {kType, 0}; }

std::int64_t number_of_trace() { return traces; }

Trace::Trace(bool for_cpu) : for_cpu_(for_cpu) {
  register_device();
  const auto here = std::this_thread::get_id();
  std::thread::id none;
  if (!tracing_thread.compare_exchange_strong(none, here)) {
    throw Error(none == here ? "a step is traced while another one of this thread is"
                             : "another thread traces a step for a TPU; they are traced one at a time: take turns");
  }
  current = this;
  ++traces;
  static const bool autograd_knows_the_device = has_backward();
  program_ = {};
  operators_.clear();
  if (autograd_knows_the_device) return;
  current = nullptr;
  tracing_thread = std::thread::id();
  throw DeviceError(
      "a backward was made in this process before its first TPUStrategy, or initialize_tpu_system: make that first");
}

Trace::~Trace() {
  current = nullptr;
  tracing_thread = std::thread::id();
}

at::Tensor Trace::argument(at::IntArrayRef sizes, at::ScalarType dtype) {
  return wrapped(program_.argument({ops::dtype_of(dtype), sizes.vec()}));
}

// One operation for each dtype: those that run on several devices must do so in the same order, and one of them waits
// for all others.
std::vector<at::Tensor> Trace::all_reduce(std::string_view operation, const std::vector<at::Tensor>& values,
                                          int replicas) {
  std::map<DType, std::vector<std::size_t>> places;
  std::vector<Value> all;
  for (const auto& value : values) {
    places[value_of(value).shape.dtype].push_back(all.size());
    all.push_back(value_of(value));
  }
  std::vector<at::Tensor> results(values.size());
  for (const auto& [dtype, of_dtype] : places) {
    std::vector<Value> operands;
    for (const auto place : of_dtype) operands.push_back(all[place]);
    const auto reduced = program_.all_reduce(operation, operands, replicas);
    for (std::size_t i = 0; i < of_dtype.size(); ++i) results[of_dtype[i]] = wrapped(reduced[i]);
  }
  return results;
}

at::Tensor Trace::all_gather(const at::Tensor& value, std::int64_t axis, int replicas) {
  return wrapped(program_.all_gather(value_of(value), axis, replicas));
}

int Trace::number_of_argument(const at::Tensor& tensor) const {
  const auto& arguments = program_.arguments();
  for (std::size_t i = arguments.size(); i-- > 0;)
    if (arguments[i].name == value_of(tensor).name) return static_cast<int>(i);
  throw Error("a tensor that is no argument of the traced program");
}

at::Tensor Trace::argument_again(int number) const {
  return wrapped(program_.arguments()[static_cast<std::size_t>(number)]);
}

bool Trace::is_argument(const at::Tensor& tensor, int number) const {
  return value_of(tensor).name == program_.arguments()[static_cast<std::size_t>(number)].name;
}

std::string Trace::finish(at::TensorList outputs, const std::vector<std::pair<int, int>>& aliases, int replicas,
                          int steps, const std::vector<bool>& stacked) {
  std::vector<Value> values;
  for (const auto& output : outputs) values.push_back(value_of(output));
  return steps == 1 ? program_.finish(values, aliases, replicas)
                    : program_.finish(values, aliases, replicas, steps, stacked);
}

const Lowerings& lowerings() {
  static const auto table = [] {
    Lowerings all;
    for (auto* const add :
         {add_pointwise, add_reductions, add_shapes, add_products, add_convolutions, add_pooling, add_adaptive_pooling,
          add_indexing, add_random, add_refused, add_composed, add_norms, add_arithmetic, add_ordering})
      add(all);
    return all;
  }();
  return table;
}

}  // namespace lockstep::tpu
