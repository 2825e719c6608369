// A parameter with hooks has one more dispatch key, for which a boxed kernel stands before all operators. Views take
// the key over, and share the memory by which the hooks are found.
#include "ops/parameter_hook.h"

#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>

#include <ATen/ops/contiguous_ops.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "base/mutex.h"

namespace lockstep::ops {
namespace {

// "Out-of-core key for Deferred Module Initialization in torchdistx" in LibTorch's words, and used by nothing in it. It
// stands before autocast and autograd.
constexpr auto kHookKey = c10::DispatchKey::DeferredInit;

// The function of the OperatorMode that lives. Only the threads that the mode is for have included the key.
OperatorMode::See mode;

std::atomic<std::uint64_t> calls = 0;  // of all threads: forward and backward may run in two

using Hooks = std::vector<std::shared_ptr<ParameterHook>>;

// By memory and place in it. Memory is held by weak references, so that no other gets the address of a remembered one.
class HookTable {
 public:
  void add(const at::Tensor& parameter, std::shared_ptr<ParameterHook> hook) {
    MutexLock lock(mutex_);
    if (table_.size() >= purge_at_) {
      std::erase_if(table_, [](const auto& entry) { return entry.second.storage.expired(); });
      purge_at_ = 2 * std::max(table_.size(), kLeast);
    }
    const auto& storage = parameter.storage();
    auto [entry, is_new] = table_.try_emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
    entry->second.by_offset[parameter.storage_offset()].push_back(std::move(hook));
  }

  Hooks of(const at::Tensor& tensor) {
    MutexLock lock(mutex_);
    const auto entry = table_.find(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    if (entry == table_.end()) return {};
    const auto& by_offset = entry->second.by_offset;
    const auto after = by_offset.upper_bound(tensor.storage_offset());
    return after == by_offset.begin() ? Hooks() : std::prev(after)->second;
  }

 private:
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  struct Entry {
    explicit Entry(WeakStorage of) : storage(std::move(of)) {}
    WeakStorage storage;
    std::map<std::int64_t, Hooks> by_offset;
  };

  static constexpr std::size_t kLeast = 32;

  Mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Entry> table_ LOCKSTEP_GUARDED_BY(mutex_);
  std::size_t purge_at_ LOCKSTEP_GUARDED_BY(mutex_) = 2 * kLeast;  // entries: temporaries come with every step
};

HookTable& table() {
  // Never destroyed: hooks hold Groups, which may be gone when the process ends.
  static auto* const hooks = new HookTable;
  return *hooks;
}

bool has_key(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(kHookKey);
}

// True in WithoutHooks, whose operator has values brought and does nothing else.
thread_local bool only_brings_values = false;

// The hooks of a call's arguments, each with the argument's place.
using PlacedHooks = std::vector<std::pair<ArgumentPlace, std::shared_ptr<ParameterHook>>>;

PlacedHooks find_hooks(const OperatorCall& call) {
  PlacedHooks found;
  for (std::size_t i = 0; i < call.arguments(); ++i) {
    const auto& argument = call.argument(i);
    const auto add = [&](const at::Tensor& tensor, const ArgumentPlace& place) {
      for (auto& hook : hooks_of(tensor)) found.emplace_back(place, std::move(hook));
    };
    if (argument.isTensor()) {
      add(argument.toTensor(), {i});
    } else if (argument.isTensorList()) {
      std::size_t element = 0;
      for (const auto& tensor : argument.toTensorVector()) add(tensor, {i, element++});
    }
  }
  return found;
}

// Gives a tensor without hooks the dispatch key.
void add_key(const at::Tensor& tensor) {
  auto& from = *tensor.unsafeGetTensorImpl();
  auto with_key = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()),
                                                       from.key_set().add(kHookKey), tensor.dtype());
  with_key->set_storage_offset(tensor.storage_offset());
  with_key->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  from.shallow_copy_from(std::move(with_key));
}

// `set_data`, which Module::to calls, first asks whether the parameter may become what `data` is: then its hooks go
// over.
void keep_hooks(const OperatorCall& call) {
  const auto parameter = call.tensor(0), data = call.tensor(1);
  if (!has_key(parameter) || !data.defined()) return;
  const auto has = table().of(data);
  for (const auto& hook : table().of(parameter)) {
    if (std::find(has.begin(), has.end(), hook) == has.end()) add_hook(data, hook);
  }
}

bool is_carried_out(const OperatorCall& call, const PlacedHooks& found) {
  for (const auto& [place, hook] : found) {
    if (hook->run(call, place.index)) return true;
  }
  for (const auto& [place, hook] : found) {
    if (hook->otherwise(call, place)) return true;
  }
  return false;
}

void run_hooks(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard without_hooks(kHookKey);
  const OperatorCall call(op, *stack);
  if (has_operator_mode() && mode(call)) return;
  const auto found = find_hooks(call);
  for (const auto& [place, hook] : found) hook->before(call, place.index);
  if (!only_brings_values && is_carried_out(call, found)) return;
  if (call.is_set_data()) keep_hooks(call);
  const auto parameter = call.is_set_storage() ? call.tensor(0) : at::Tensor();
  const auto kept = hooks_of(parameter);
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kHookKey), stack);
  if (kept.empty() || !table().of(parameter).empty()) return;
  for (const auto& hook : kept) table().add(parameter, hook);  // as torch::load does
}

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_hooks>());
}

}  // namespace

OperatorCall::OperatorCall(const c10::OperatorHandle& op, torch::jit::Stack& stack)
    : op_(op), stack_(stack), count_(op.schema().arguments().size()), number_(++calls) {}

at::Tensor OperatorCall::tensor(std::size_t i) const {
  return i < count_ && argument(i).isTensor() ? argument(i).toTensor() : at::Tensor();
}

at::Tensor OperatorCall::tensor(const ArgumentPlace& place) const {
  return place.element ? argument(place.index).toTensorList().get(*place.element) : tensor(place.index);
}

void OperatorCall::replace(const ArgumentPlace& place, at::Tensor tensor) const {
  if (!place.element) {
    argument(place.index) = std::move(tensor);
    return;
  }
  auto list = argument(place.index).toTensorList().copy();  // the caller may have the list
  list.set(*place.element, std::move(tensor));
  argument(place.index) = std::move(list);
}

std::optional<c10::IValue> OperatorCall::named(const char* name) const {
  const auto i = op_.schema().argumentIndexWithName(name);
  return i ? std::optional(argument(static_cast<std::size_t>(*i))) : std::nullopt;
}

bool OperatorCall::is_pointwise() const { return op_.hasTag(at::Tag::pointwise); }

bool OperatorCall::writes(std::size_t i) const {
  const auto* const alias = op_.schema().arguments()[i].alias_info();
  return alias != nullptr && alias->isWrite();
}

bool OperatorCall::reads() const {
  // Others that may return a view, such as reshape and to, copy where they must.
  static const std::unordered_set<std::string> views{"aten::alias",
                                                     "aten::as_strided",
                                                     "aten::detach",
                                                     "aten::diagonal",
                                                     "aten::expand",
                                                     "aten::permute",
                                                     "aten::select",
                                                     "aten::slice",
                                                     "aten::split",
                                                     "aten::squeeze",
                                                     "aten::t",
                                                     "aten::transpose",
                                                     "aten::unbind",
                                                     "aten::unsqueeze",
                                                     "aten::view",
                                                     "aten::set_",
                                                     "aten::_has_compatible_shallow_copy_type"};
  return !views.contains(name());
}

bool OperatorCall::is_set_data() const { return name() == "aten::_has_compatible_shallow_copy_type"; }
bool OperatorCall::is_set_storage() const { return name() == "aten::set_"; }

void OperatorCall::finish(at::Tensor result) const {
  torch::jit::drop(stack_, count_);
  torch::jit::push(stack_, std::move(result));
}

OperatorMode::OperatorMode(See see) : guard_(kHookKey) { mode = std::move(see); }
OperatorMode::~OperatorMode() { mode = nullptr; }
bool has_operator_mode() { return c10::impl::tls_is_dispatch_key_included(kHookKey); }

void add_hook(const at::Tensor& parameter, std::shared_ptr<ParameterHook> hook) {
  if (!has_key(parameter)) add_key(parameter);
  table().add(parameter, std::move(hook));
}

std::vector<std::shared_ptr<ParameterHook>> hooks_of(const at::Tensor& parameter) {
  return has_key(parameter) ? table().of(parameter) : Hooks();
}

bool has_hooks(const at::Tensor& tensor) {
  return has_key(tensor) && !c10::impl::tls_is_dispatch_key_excluded(kHookKey);
}

bool has_values(const at::Tensor& parameter) { return parameter.numel() == 0 || parameter.storage().data() != nullptr; }

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

WithoutHooks::WithoutHooks(const at::Tensor& parameter) {
  // Calls an operator that reads the parameter, and mostly copies nothing. Tensor::contiguous itself would call none.
  if (has_hooks(parameter)) {
    only_brings_values = true;
    const auto ends = c10::make_scope_exit([] { only_brings_values = false; });
    at::_ops::contiguous::call(parameter, at::MemoryFormat::Contiguous);
  }
  guard_.emplace(kHookKey);
}

}  // namespace lockstep::ops
