// GPUs that are simulated in host memory, for tests. LibTorch, as the build without the preset `cuda` links it, has no
// part for CUDA. This file takes its place: operators on cuda:0, ... compute on the CPU, and backward has a thread for
// each device. So the code for GPUs is tested where there is none. Tests see in which threads it runs, and that no
// operator gets tensors of two devices. Only operators can access a tensor's memory, which cannot be read at its
// address. Streams, kernels and CUDA graphs are not tested. LOCKSTEP_SIMULATED_GPUS says how many GPUs there are; else
// there is none.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

using at::Tensor;

c10::DeviceIndex gpus() {
  static const char* const given = std::getenv("LOCKSTEP_SIMULATED_GPUS");
  return static_cast<c10::DeviceIndex>(given == nullptr ? 0 : std::atoi(given));
}

thread_local c10::DeviceIndex current = 0;

// Memory that appears twice: at the address of a tensor, where it cannot be accessed, and for operators.
class DeviceMemory final : public c10::Allocator {
 public:
  static DeviceMemory& get() {
    static auto* const memory = new DeviceMemory;  // tensors may outlive all else
    return *memory;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device device(c10::kCUDA, current);
    if (bytes == 0) return {nullptr, device};
    const auto size = std::max<std::size_t>(512, std::bit_ceil(bytes));
    const std::lock_guard lock(mutex_);
    auto& free = free_[size];
    void* address = nullptr;
    if (free.empty()) {
      TORCH_CHECK(used_ + size <= kBytes, "the simulated GPU has no memory left");
      address = at_device_ + std::exchange(used_, used_ + size);
    } else {
      address = free.back();
      free.pop_back();
    }
    size_of_[address] = size;
    return {address, address, [](void* given) { get().give_back(given); }, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* given) { get().give_back(given); };
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memmove(for_operators(to), for_operators(from), bytes);
  }

  void* for_operators(const void* address) const {
    return for_operators_ + (static_cast<const char*>(address) - at_device_);
  }

 private:
  static constexpr std::size_t kBytes = 8UL << 30;  // takes as much as is used

  DeviceMemory() {
    const int file = ::memfd_create("simulated GPU", 0);
    TORCH_CHECK(file >= 0 && ::ftruncate(file, kBytes) == 0, "no memory for a simulated GPU");
    const auto map = [&](int access) {
      auto* const address = ::mmap(nullptr, kBytes, access, MAP_SHARED, file, 0);
      TORCH_CHECK(address != MAP_FAILED, "no memory for a simulated GPU");
      return static_cast<char*>(address);
    };
    at_device_ = map(PROT_NONE);
    for_operators_ = map(PROT_READ | PROT_WRITE);
    ::close(file);
  }

  void give_back(void* address) {
    const std::lock_guard lock(mutex_);
    const auto found = size_of_.find(address);
    free_[found->second].push_back(address);
    size_of_.erase(found);
  }

  char *at_device_ = nullptr, *for_operators_ = nullptr;
  std::mutex mutex_;
  std::size_t used_ = 0;
  std::map<std::size_t, std::vector<void*>> free_;  // by size
  std::map<void*, std::size_t> size_of_;
};

const at::Generator& generator_of(c10::DeviceIndex device) {
  static const auto* const generators = [] {
    auto* const all = new std::vector<at::Generator>;
    for (int i = 0; i < gpus(); ++i) all->push_back(at::detail::createCPUGenerator());
    return all;
  }();
  return generators->at(static_cast<std::size_t>(device));
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {c10::kCUDA, std::exchange(current, device.index())};
  }
  c10::Device getDevice() const override { return {c10::kCUDA, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return gpus(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return gpus() > 0; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return gpus() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return gpus(); }
  int getNumGPUs() const override { return gpus(); }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::Device getDeviceFromPtr(void*) const override { return {c10::kCUDA, current}; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return generator_of(device < 0 ? current : device);
  }
};

// The tensor in host memory with which operators compute.
Tensor on_cpu(const Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  return at::from_blob(
      DeviceMemory::get().for_operators(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), [tensor](void*) {},
      tensor.options().device(at::kCPU));
}

c10::Device device_of(std::optional<c10::Device> given) {
  return given && given->has_index() ? *given : c10::Device(c10::kCUDA, current);
}

Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_of(device));
  return at::detail::empty_generic(sizes, &DeviceMemory::get(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device_of(device));
  return at::detail::empty_strided_generic(sizes, strides, &DeviceMemory::get(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor& copy(Tensor& to, const Tensor& from, bool) {
  if (to.numel() > 0) on_cpu(to).copy_(on_cpu(from));
  return to;
}

const Tensor& set_size(const Tensor& tensor, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat>) {
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  const auto bytes = static_cast<std::size_t>(tensor.numel() + tensor.storage_offset()) * tensor.element_size();
  auto& storage = impl->unsafe_storage();
  if (storage.nbytes() >= bytes) return tensor;
  const c10::DeviceGuard guard(tensor.device());
  auto memory = DeviceMemory::get().allocate(bytes);
  if (storage.nbytes() > 0) DeviceMemory::get().copy_data(memory.get(), storage.data(), storage.nbytes());
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
  return tensor;
}

Tensor copy_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) set_size(to, from.sizes(), std::nullopt);
  auto into = to;
  return copy(into, from, false);
}

// The device of an operator's arguments. Throws where they are on several, which none may be but scalars and indices.
c10::Device device_of_arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto count = op.schema().arguments().size();
  const bool has_indices = op.schema().name().find("index") != std::string::npos;
  std::optional<c10::Device> found;
  const auto check = [&](const Tensor& tensor) {
    if (!tensor.defined() || (tensor.is_cpu() && (tensor.dim() == 0 || has_indices))) return;
    if (!found) found = tensor.device();
    TORCH_CHECK(*found == tensor.device(), op.schema().name(), " got tensors on ", *found, " and on ", tensor.device());
  };
  for (auto argument = stack.end() - static_cast<std::ptrdiff_t>(count); argument != stack.end(); ++argument) {
    if (argument->isTensor()) check(argument->toTensor());
    if (!argument->isTensorList()) continue;
    for (const Tensor& tensor : argument->toTensorList()) check(tensor);
  }
  return found.value_or(c10::Device(c10::kCUDA, current));
}

void compute_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto device = device_of_arguments(op, *stack);
  const auto& arguments = op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[stack->size() - arguments.size() + i];
    if (arguments[i].name() == "generator" && value.isNone()) value = generator_of(device.index());
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy);
  library.impl("_copy_from_and_resize", &copy_and_resize);
  library.impl("resize_", &set_size);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>()); }

const c10::impl::DeviceGuardImplRegistrar kGuard(c10::kCUDA, new Guard);
const bool kAllocator = [] {
  c10::SetAllocator(c10::kCUDA, &DeviceMemory::get());
  return true;
}();

}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks);
}
