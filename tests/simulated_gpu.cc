// LibTorch's part for CUDA, over simulated GPUs (simulated_gpu/cuda_runtime.h), for tests. LibTorch, as the build
// without the preset `cuda` links it, has no such part. This file takes its place: backward has a thread for each
// device, and tests see that no operator gets tensors of two devices. Only operators can access a tensor's memory,
// which cannot be read at its address.
//
// Streams and events are those of the simulated runtime. Operators and copies compute on the CPU in the calling thread.
// First they wait until their device's current stream is idle. So they see the results of the work that this stream was
// told to wait for, and of other streams only by chance. Kernels and CUDA graphs are not tested.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "simulated_gpu/cuda_runtime.h"

namespace {

using at::Tensor;

void check(int error) { TORCH_CHECK(error == simulated_gpu::kSuccess, "simulated CUDA: ", cudaGetErrorString(error)); }

c10::DeviceIndex gpus() {
  int count = 0;
  cudaGetDeviceCount(&count);
  return static_cast<c10::DeviceIndex>(count);
}

c10::DeviceIndex current_device() {
  int device = 0;
  cudaGetDevice(&device);
  return static_cast<c10::DeviceIndex>(device);
}

// A stream's id is its handle. The default stream's is null, which stands for that of the current device.
cudaStream_t handle_of(const c10::Stream& stream) { return reinterpret_cast<cudaStream_t>(stream.id()); }

c10::Stream stream_of(cudaStream_t handle, c10::Device device) {
  return c10::Stream(c10::Stream::UNSAFE, device, reinterpret_cast<c10::StreamId>(handle));
}

constexpr std::size_t kMostGpus = 64;
thread_local std::array<cudaStream_t, kMostGpus> current_streams{};  // by device

c10::Stream current_stream(c10::Device device) {
  return stream_of(current_streams.at(static_cast<std::size_t>(device.index())), device);
}

// Waits for the work that the device's current stream has, and for what it was told to wait for.
void wait_for_current_stream(c10::Device device) {
  const c10::DeviceGuard guard(device);
  check(cudaStreamSynchronize(handle_of(current_stream(device))));
}

// Memory is free again when its last user's work is done: that of the stream where it was allocated, and of those that
// record_stream named.
class DeviceAllocator final : public c10::Allocator {
 public:
  static DeviceAllocator& get() {
    static auto* const allocator = new DeviceAllocator;  // tensors may outlive all else
    return *allocator;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device device(c10::kCUDA, current_device());
    if (bytes == 0) return {nullptr, device};
    void* const address = simulated_gpu_allocate(bytes);
    TORCH_CHECK(address != nullptr, "the simulated GPU has no memory left");
    add_user(address, current_stream(device));
    return {address, address, &give_back, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memmove(simulated_gpu_memory(to), simulated_gpu_memory(from), bytes);
  }

  void add_user(void* address, const c10::Stream& stream) {
    const std::lock_guard lock(mutex_);
    auto& users = users_[address];
    if (std::find(users.begin(), users.end(), stream) == users.end()) users.push_back(stream);
  }

 private:
  static void give_back(void* address) {
    // Its last copy frees the memory.
    const std::shared_ptr<void> memory(address, &simulated_gpu_free);
    for (const auto& stream : get().take_users(address)) {
      const c10::DeviceGuard guard(stream.device());
      if (cudaStreamQuery(handle_of(stream)) != simulated_gpu::kNotReady) continue;
      const auto drop = [](void* copy) { delete static_cast<std::shared_ptr<void>*>(copy); };
      cudaLaunchHostFunc(handle_of(stream), drop, new std::shared_ptr<void>(memory));
    }
  }

  std::vector<c10::Stream> take_users(void* address) {
    const std::lock_guard lock(mutex_);
    const auto found = users_.find(address);
    auto users = std::move(found->second);
    users_.erase(found);
    return users;
  }

  std::mutex mutex_;
  std::map<void*, std::vector<c10::Stream>> users_;
};

const at::Generator& generator_of(c10::DeviceIndex device) {
  static const auto* const generators = [] {
    auto* const all = new std::vector<at::Generator>;
    for (int i = 0; i < gpus(); ++i) all->push_back(at::detail::createCPUGenerator());
    return all;
  }();
  return generators->at(static_cast<std::size_t>(device));
}

cudaStream_t new_stream(c10::Device device, int priority) {
  const c10::DeviceGuard guard(device);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithPriority(&stream, 1, priority));
  return stream;
}

// Streams that are used again and again, as LibTorch has them.
cudaStream_t stream_from_pool(c10::Device device) {
  static std::mutex mutex;
  static auto& pools = *new std::map<c10::DeviceIndex, std::pair<std::size_t, std::array<cudaStream_t, 32>>>;
  const std::lock_guard lock(mutex);
  auto& [taken, streams] = pools[device.index()];
  auto& stream = streams[taken++ % streams.size()];
  if (stream == nullptr) stream = new_stream(device, 0);
  return stream;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, current_device()}; }
  void setDevice(c10::Device device) const override { check(cudaSetDevice(device.index())); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { cudaSetDevice(device.index()); }
  c10::DeviceIndex deviceCount() const noexcept override { return gpus(); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    const c10::DeviceGuard guard(c10::Device(c10::kCUDA, device));
    check(cudaDeviceSynchronize());
  }
  c10::Stream getStream(c10::Device device) const override { return current_stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(nullptr, device); }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return stream_of(new_stream(device, priority), device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_of(stream_from_pool(device), device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto& current = current_streams.at(static_cast<std::size_t>(stream.device_index()));
    return stream_of(std::exchange(current, handle_of(stream)), stream.device());
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return handle_of(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    const c10::DeviceGuard guard(stream.device());
    return is_done(cudaStreamQuery(handle_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const c10::DeviceGuard guard(stream.device());
    check(cudaStreamSynchronize(handle_of(stream)));
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    if (memory.get() != nullptr) DeviceAllocator::get().add_user(memory.get(), stream);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    const c10::DeviceGuard guard(stream.device());
    if (*event == nullptr) check(cudaEventCreateWithFlags(event, 0));
    check(cudaEventRecord(*event, handle_of(stream)));
  }
  void block(void* event, const c10::Stream& stream) const override {
    const c10::DeviceGuard guard(stream.device());
    if (event != nullptr) check(cudaStreamWaitEvent(handle_of(stream), event, 0));
  }
  bool queryEvent(void* event) const override { return event == nullptr || is_done(cudaEventQuery(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) check(cudaEventSynchronize(event));
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end));
    return milliseconds;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) cudaEventDestroy(event);
  }

 private:
  static bool is_done(int result) {
    if (result != simulated_gpu::kNotReady) check(result);
    return result == simulated_gpu::kSuccess;
  }
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
  c10::DeviceIndex current_device() const override { return ::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return ::current_device(); }
  c10::Device getDeviceFromPtr(void* memory) const override {
    return {c10::kCUDA, static_cast<c10::DeviceIndex>(simulated_gpu_device(memory, 0))};
  }
  void deviceSynchronize(c10::DeviceIndex device) const override { Guard().synchronizeDevice(device); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return generator_of(device < 0 ? ::current_device() : device);
  }
};

// The tensor in host memory with which operators compute.
Tensor on_cpu(const Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  return at::from_blob(
      simulated_gpu_memory(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), [tensor](void*) {},
      tensor.options().device(at::kCPU));
}

c10::Device device_of(std::optional<c10::Device> given) {
  return given && given->has_index() ? *given : c10::Device(c10::kCUDA, current_device());
}

Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_of(device));
  return at::detail::empty_generic(sizes, &DeviceAllocator::get(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device_of(device));
  return at::detail::empty_strided_generic(sizes, strides, &DeviceAllocator::get(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

thread_local bool in_operator = false;  // which copies its arguments and results

// Copies between host and device, as LibTorch does: by cudaMemcpyAsync of contiguous memory of one dtype.
void copy_across(const Tensor& to, const Tensor& from) {
  const auto device = to.is_cuda() ? to.device() : from.device();
  const c10::DeviceGuard guard(device);
  const auto contiguous = [&](const Tensor& tensor) {
    return tensor.is_contiguous() && tensor.sizes() == to.sizes() && tensor.scalar_type() == to.scalar_type();
  };
  const auto source = contiguous(from) ? from : at::empty(to.sizes(), from.options().dtype(to.scalar_type()));
  const auto target = contiguous(to) ? to : at::empty(to.sizes(), to.options());
  if (!source.is_same(from)) on_cpu(source).copy_(on_cpu(from));
  const auto stream = handle_of(current_stream(device));
  constexpr int kByAddress = 4;
  check(cudaMemcpyAsync(target.mutable_data_ptr(), source.const_data_ptr(), target.nbytes(), kByAddress, stream));
  check(cudaStreamSynchronize(stream));
  if (!target.is_same(to)) on_cpu(to).copy_(on_cpu(target));
}

Tensor& copy(Tensor& to, const Tensor& from, bool) {
  if (to.numel() == 0) return to;
  for (const auto& tensor : {to, from}) {
    if (tensor.is_cuda()) wait_for_current_stream(tensor.device());
  }
  if (to.is_cuda() == from.is_cuda() || in_operator) {
    on_cpu(to).copy_(on_cpu(from));
  } else {
    copy_across(to, from);
  }
  return to;
}

const Tensor& set_size(const Tensor& tensor, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat>) {
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  const auto bytes = static_cast<std::size_t>(tensor.numel() + tensor.storage_offset()) * tensor.element_size();
  auto& storage = impl->unsafe_storage();
  if (storage.nbytes() >= bytes) return tensor;
  const c10::DeviceGuard guard(tensor.device());
  wait_for_current_stream(tensor.device());
  auto memory = DeviceAllocator::get().allocate(bytes);
  if (storage.nbytes() > 0) DeviceAllocator::get().copy_data(memory.get(), storage.data(), storage.nbytes());
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
  return tensor;
}

Tensor copy_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) set_size(to, from.sizes(), std::nullopt);
  auto into = to;
  return copy(into, from, false);
}

void record_stream(Tensor& tensor, at::Stream stream) {
  Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
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
  return found.value_or(c10::Device(c10::kCUDA, current_device()));
}

void compute_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto device = device_of_arguments(op, *stack);
  const auto& arguments = op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[stack->size() - arguments.size() + i];
    if (arguments[i].name() == "generator" && value.isNone()) value = generator_of(device.index());
  }
  wait_for_current_stream(device);
  const c10::DeviceGuard guard(device);
  struct InOperator {
    const bool before = std::exchange(in_operator, true);
    ~InOperator() { in_operator = before; }
  } const here;
  at::native::cpu_fallback(op, stack);
}

// The fallback would lose the running statistics: the operator's schema does not say that they are written.
std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor& x, const std::optional<Tensor>& weight,
                                              const std::optional<Tensor>& bias, const std::optional<Tensor>& mean,
                                              const std::optional<Tensor>& variance, bool training, double momentum,
                                              double epsilon) {
  const c10::DeviceGuard guard(x.device());
  wait_for_current_stream(x.device());
  const auto here = [](const std::optional<Tensor>& tensor) {
    return tensor && tensor->defined() ? std::optional(on_cpu(*tensor)) : tensor;
  };
  const auto [y, of_mean, of_variance] = at::native_batch_norm(on_cpu(x), here(weight), here(bias), here(mean),
                                                               here(variance), training, momentum, epsilon);
  return {y.to(x.device()), of_mean.to(x.device()), of_variance.to(x.device())};
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("native_batch_norm", &batch_norm);
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy);
  library.impl("_copy_from_and_resize", &copy_and_resize);
  library.impl("resize_", &set_size);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>()); }

const c10::impl::DeviceGuardImplRegistrar kGuard(c10::kCUDA, new Guard);
const bool kAllocator = [] {
  c10::SetAllocator(c10::kCUDA, &DeviceAllocator::get());
  return true;
}();

}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks);
}
