// A CUDA device that is not there, for tests on a machine without a GPU.
//
// Tensors say "cuda:N", live in host memory and are computed by the CPU's kernels. The device keeps what CUDA keeps and a CPU
// does not: blocks of 512 bytes counted per device, a limit that raises torch.OutOfMemoryError, the refusal of tensors on two
// devices, a count of every moment at which the host waits for the device, and graphs that are recorded once and replayed.
// It emulates no streams, no kernels of CUDA's own, and no time. A copy to pinned memory that the host does not wait for arrives
// when the host waits: until then the memory holds wrong values. Ranks exchange tensors by pretended_nccl.h.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/profiler/stubs/base.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <chrono>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

using namespace at;

static constexpr size_t BLOCK_BYTES = 512;  // CUDA's caching allocator rounds to it
static constexpr int MAX_DEVICES = 16;

static int device_count = 1;
static thread_local int active_device = 0;
static thread_local int64_t current_stream = 0;
static std::mutex counters_lock;

// ---- memory ----

struct DeviceMemory {
  size_t allocated = 0;
  size_t peak = 0;
  size_t limit = 0;  // 0: none
};
static DeviceMemory memory[MAX_DEVICES];
static size_t left_bytes = 0, left_after = 0, copies_to_host = 0;  // other processes take all but left_bytes after so many copies

static size_t limit_now(const DeviceMemory& of_device) {
  const bool are_there = left_after && copies_to_host >= left_after;
  return are_there ? std::min(of_device.limit, left_bytes) : of_device.limit;
}
static std::map<void*, std::pair<int, size_t>> blocks;  // address -> device, bytes

static void release_block(void* address) {
  if (!address) return;
  std::lock_guard<std::mutex> lock(counters_lock);
  auto block = blocks.find(address);
  if (block != blocks.end()) {
    memory[block->second.first].allocated -= block->second.second;
    blocks.erase(block);
  }
  free(address);
}

struct PretendedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = active_device;
    void* address = nullptr;
    if (bytes) {
      const size_t size = (bytes + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
      std::lock_guard<std::mutex> lock(counters_lock);
      auto& of_device = memory[device];
      TORCH_CHECK_WITH(OutOfMemoryError, !of_device.limit || of_device.allocated + size <= limit_now(of_device),
                       "CUDA out of memory. Tried to allocate ", size / 1048576.0, " MiB. GPU ", device, " (pretended)");
      address = aligned_alloc(BLOCK_BYTES, size);
      blocks[address] = {device, size};
      of_device.allocated += size;
      of_device.peak = std::max(of_device.peak, of_device.allocated);
    }
    return {address, address, &release_block, Device(kCUDA, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
static PretendedAllocator allocator;

// ---- pinned memory, and copies into it that wait ----

static std::mutex pinned_lock;
static std::map<char*, size_t> pinned;  // address -> bytes
static size_t pinned_block_bytes = 0, pinned_block_peak = 0;

static size_t power_of_two(size_t bytes) {  // CUDA's caching host allocator rounds to it
  size_t size = 1;
  while (size < bytes) size *= 2;
  return size;
}

static void register_pinned(void* address, size_t bytes) {
  std::lock_guard<std::mutex> lock(pinned_lock);
  pinned[static_cast<char*>(address)] = bytes;
}

static void unregister_pinned(void* address) {
  std::lock_guard<std::mutex> lock(pinned_lock);
  pinned.erase(static_cast<char*>(address));
}

static bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(pinned_lock);
  auto next = pinned.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (next == pinned.begin()) return false;
  auto block = std::prev(next);
  return static_cast<const char*>(address) < block->first + block->second;
}

static void release_pinned(void* address) {
  if (!address) return;
  {
    std::lock_guard<std::mutex> lock(pinned_lock);
    auto block = pinned.find(static_cast<char*>(address));
    pinned_block_bytes -= power_of_two(block->second);
    pinned.erase(block);
  }
  free(address);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = bytes ? aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    if (address) {
      register_pinned(address, bytes);
      std::lock_guard<std::mutex> lock(pinned_lock);
      pinned_block_bytes += power_of_two(bytes);
      pinned_block_peak = std::max(pinned_block_peak, pinned_block_bytes);
    }
    return {address, address, &release_pinned, Device(kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
static PinnedAllocator pinned_allocator;

struct WaitingCopy {
  uint64_t ticket;
  Tensor target;
  Tensor values;
};
static std::mutex waiting_lock;
static std::vector<WaitingCopy> waiting;
static uint64_t last_ticket = 0;

static void copy_later(const Tensor& target, const Tensor& values) {
  std::lock_guard<std::mutex> lock(waiting_lock);
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  Tensor kept = values.to(target.scalar_type()).clone();
  waiting.push_back({++last_ticket, target.detach(), kept});
  if (target.is_floating_point() || target.is_complex()) waiting.back().target.fill_(std::numeric_limits<double>::quiet_NaN());
  else waiting.back().target.copy_(kept.bitwise_not());
}

// Let the copies up to this ticket arrive: the host waited for them.
static void arrive(uint64_t ticket = std::numeric_limits<uint64_t>::max()) {
  std::lock_guard<std::mutex> lock(waiting_lock);
  if (waiting.empty()) return;
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  std::vector<WaitingCopy> later;
  for (auto& copy : waiting) {
    if (copy.ticket <= ticket) copy.target.copy_(copy.values);
    else later.push_back(std::move(copy));
  }
  waiting = std::move(later);
}

// ---- devices and streams ----

struct PretendedGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kCUDA; }
  Device exchangeDevice(Device device) const override {
    Device before(kCUDA, active_device);
    active_device = device.index();
    return before;
  }
  Device getDevice() const override { return Device(kCUDA, active_device); }
  void setDevice(Device device) const override { active_device = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { active_device = device.index(); }
  c10::Stream getStream(Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, Device(kCUDA, device.index() < 0 ? active_device : device.index()), current_stream);
  }
  c10::Stream getDefaultStream(Device device) const override { return c10::Stream(c10::Stream::UNSAFE, device, 0); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return c10::Stream(c10::Stream::UNSAFE, device, 1); }
  c10::Stream getNewStream(Device device, int) const override { return c10::Stream(c10::Stream::UNSAFE, device, 2); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before(c10::Stream::UNSAFE, stream.device(), current_stream);
    current_stream = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return device_count; }
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override { *event = (void*)1; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { arrive(); }
  void synchronizeEvent(void*) const override { arrive(); }
  void synchronizeDevice(const DeviceIndex) const override { arrive(); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, PretendedGuard)

struct CUDAHooks : CUDAHooksInterface {  // torch looks for a class of this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  DeviceIndex deviceCount() const override { return device_count; }
  DeviceIndex getCurrentDevice() const override { return active_device; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  Device getDeviceFromPtr(void*) const override { return Device(kCUDA, active_device); }
};
using CUDAHooksRegistryAlias = CUDAHooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, CUDAHooks)

// ---- the CPU's view of a device's tensor ----

static Tensor twin(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto storage = tensor.storage();
  auto* kept_alive = new c10::Storage(storage);
  c10::DataPtr bytes(storage.mutable_data(), kept_alive, [](void* kept) { delete static_cast<c10::Storage*>(kept); }, Device(kCPU));
  c10::Storage on_cpu(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(bytes), c10::GetCPUAllocator(), true);
  Tensor view = at::detail::make_tensor<c10::TensorImpl>(std::move(on_cpu), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* implementation = view.unsafeGetTensorImpl();
  implementation->set_storage_offset(tensor.storage_offset());
  implementation->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) implementation->set_wrapped_number(true);
  return view;
}

#include "pretended_nccl.h"

static Tensor copy_to_device(const Tensor& tensor, Device device) {
  c10::OptionalDeviceGuard guard(device);
  Tensor copy = at::detail::empty_strided_generic(tensor.sizes(), tensor.strides(), &allocator,
                                                  c10::DispatchKeySet(c10::DispatchKey::CUDA), tensor.scalar_type());
  twin(copy).copy_(tensor);
  return copy;
}

// ---- operators ----

static std::map<std::string, int64_t> host_waits, operator_calls;
static const std::set<std::string> WAITS = {  // their results' shapes or values are read by the host
    "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::masked_select", "aten::_unique2",
    "aten::unique_consecutive", "aten::unique_dim", "aten::bincount"};
static const std::set<std::string> TAKES_TWO_DEVICES = {
    "aten::copy_", "aten::_local_scalar_dense", "aten::index_put_", "aten::_index_put_impl_", "aten::index.Tensor", "aten::index",
    "aten::_amp_foreach_non_finite_check_and_unscale_", "aten::_fused_adamw_", "aten::set_"};

// A graph: the operators that ran while it was recorded, with their inputs and the tensors that hold their results.
struct RecordedCall {
  c10::OperatorHandle operation;
  std::vector<c10::IValue> inputs;
  std::vector<Tensor> results;  // undefined: a view of an input, or an input that was changed in place
};
struct Graph {
  std::vector<RecordedCall> calls;
};
static std::shared_ptr<Graph> recording;
static bool replaying = false;

static bool shares_memory(const Tensor& one, const Tensor& other) {
  return one.defined() && other.defined() && one.has_storage() && other.has_storage() && one.storage().data() &&
         one.storage().data() == other.storage().data();
}

static void record_call(const c10::OperatorHandle& operation, std::vector<c10::IValue> inputs, const torch::jit::Stack& stack, size_t first) {
  RecordedCall call{operation, std::move(inputs), {}};
  auto note = [&](const Tensor& result) {
    bool is_new = result.defined() && result.is_cuda();
    for (const auto& input : call.inputs) {
      if (input.isTensor() && shares_memory(input.toTensor(), result)) is_new = false;
      if (input.isTensorList()) for (const Tensor& tensor : input.toTensorVector()) if (shares_memory(tensor, result)) is_new = false;
    }
    call.results.push_back(is_new ? result : Tensor());
  };
  for (size_t index = first; index < stack.size(); ++index) {
    if (stack[index].isTensor()) note(stack[index].toTensor());
    else if (stack[index].isTensorList()) for (const Tensor& tensor : stack[index].toTensorVector()) note(tensor);
  }
  recording->calls.push_back(std::move(call));
}

static void run_on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  const std::string& name = schema.name();
  const auto num_arguments = schema.arguments().size();
  const auto begin = stack->size() - num_arguments;
  std::vector<c10::IValue> inputs(stack->begin() + begin, stack->end());
  {
    std::lock_guard<std::mutex> lock(counters_lock);
    operator_calls[name]++;
    if (WAITS.count(name)) host_waits[name]++;
  }
  if (WAITS.count(name)) arrive();
  TORCH_CHECK(!recording || !WAITS.count(name), "operation not permitted when stream is capturing (", name, ")");
  std::vector<std::pair<Tensor, Tensor>> pairs;  // a device's tensor, and its twin
  std::optional<Device> device;
  auto to_twin = [&](const Tensor& tensor) -> Tensor {
    if (!tensor.defined()) return tensor;
    if (tensor.is_cuda()) {
      TORCH_CHECK(!device || *device == tensor.device() || TAKES_TWO_DEVICES.count(name),
                  "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ", tensor.device(), "! (", name, ")");
      device = tensor.device();
      Tensor on_cpu = twin(tensor);
      pairs.emplace_back(tensor, on_cpu);
      return on_cpu;
    }
    TORCH_CHECK(tensor.dim() == 0 || TAKES_TWO_DEVICES.count(name) || !tensor.device().is_cpu(),
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (", name, ")");
    return tensor;
  };
  for (size_t index = begin; index < begin + num_arguments; ++index) {
    auto& value = (*stack)[index];
    if (value.isTensor()) {
      value = to_twin(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> twins;
      for (const Tensor& tensor : value.toTensorVector()) twins.push_back(to_twin(tensor));
      value = twins;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> twins;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList().vec()) twins.push_back(tensor ? std::optional<Tensor>(to_twin(*tensor)) : tensor);
      value = twins;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      device = value.toDevice();
      value = Device(kCPU);
    } else if (value.isGenerator() && value.toGenerator().defined() && value.toGenerator().device().is_cuda()) {
      value = at::detail::getDefaultCPUGenerator();
    }
  }
  if (device && device->index() < 0) device = Device(kCUDA, active_device);
  operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& [tensor, on_cpu] : pairs) {
    if (on_cpu.sizes() != tensor.sizes() || on_cpu.storage_offset() != tensor.storage_offset()) {  // resized in place
      at::native::resize_impl_cpu_(tensor.unsafeGetTensorImpl(), on_cpu.sizes(), on_cpu.strides());
      twin(tensor).copy_(on_cpu);
    }
  }
  const auto first = stack->size() - schema.returns().size();
  auto to_device = [&](const Tensor& result) -> Tensor {
    if (!result.defined() || !result.device().is_cpu() || !device) return result;
    for (auto& [tensor, on_cpu] : pairs) if (on_cpu.is_same(result)) return tensor;
    for (auto& [tensor, on_cpu] : pairs) {
      if (result.storage().data() && result.storage().data() == tensor.storage().data()) {
        Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CUDA), result.dtype());
        view.unsafeGetTensorImpl()->set_storage_offset(result.storage_offset());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
        return view;
      }
    }
    return copy_to_device(result, *device);
  };
  for (size_t index = first; index < stack->size(); ++index) {
    auto& value = (*stack)[index];
    if (value.isTensor()) {
      value = to_device(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> results;
      for (const Tensor& tensor : value.toTensorVector()) results.push_back(to_device(tensor));
      value = results;
    }
  }
  if (recording && !replaying) record_call(operation, std::move(inputs), *stack, first);
}

static void replay_graph(const Graph& graph) {
  replaying = true;
  for (const auto& call : graph.calls) {
    torch::jit::Stack stack(call.inputs.begin(), call.inputs.end());
    call.operation.callBoxed(&stack);
    size_t next = 0;
    auto keep = [&](const Tensor& result) {
      const Tensor& recorded = call.results[next++];
      if (recorded.defined()) twin(recorded).copy_(twin(result));
    };
    for (const auto& value : stack) {
      if (next >= call.results.size()) break;
      if (value.isTensor()) keep(value.toTensor());
      else if (value.isTensorList()) for (const Tensor& tensor : value.toTensorVector()) keep(tensor);
    }
  }
  replaying = false;
}

static Tensor empty_on_device(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
                              std::optional<bool>, std::optional<MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device && device->has_index() ? device : std::nullopt);
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype_or_default(dtype), format);
}

static Tensor empty_strided_on_device(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                                      std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device && device->has_index() ? device : std::nullopt);
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype_or_default(dtype));
}

static Tensor& copy_between_devices(Tensor& self, const Tensor& source, bool non_blocking) {
  {
    std::lock_guard<std::mutex> lock(counters_lock);
    if (self.is_cpu() && source.is_cuda()) copies_to_host++;
    if (self.is_cpu() && source.is_cuda()) host_waits[non_blocking ? "device to host, not waited for" : "device to host"]++;
    if (self.is_cuda() && source.is_cpu() && !non_blocking) host_waits["host to device, blocking"]++;
  }
  const bool is_later = self.is_cpu() && non_blocking && self.has_storage() && is_pinned(self.storage().data());
  if (is_later) {
    copy_later(self, twin(source));
    return self;
  }
  if (self.is_cpu() || source.is_cpu()) arrive();  // a stream does one copy after another
  Tensor target = twin(self);
  target.copy_(twin(source));
  if (recording && !replaying && self.is_cuda()) {
    static auto operation = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    recording->calls.push_back({operation, {self, source, non_blocking}, {Tensor()}});
  }
  return self;
}

static const Tensor& resize_on_device(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat> format) {
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), size, std::nullopt);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

// FSDP frees the storage of a gathered weight and fills it again.
static void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::OptionalDeviceGuard guard(storage.device());
  c10::DataPtr data = allocator.allocate(bytes);
  if (bytes && storage.nbytes()) memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

// Attention keeps what a GPU's kernels keep, which is not the attention probabilities: the CPU's flash kernel computes it. What
// that kernel cannot compute, and what keeps nothing for a backward pass, goes the way of plain operators.
static std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                                                      const std::optional<Tensor>& bias, bool, double dropout, bool causal,
                                                                      std::optional<double> scale) {
  auto mask = bias && bias->defined() ? std::optional<Tensor>(twin(*bias)) : std::nullopt;
  auto [output, log_sums] = at::_scaled_dot_product_flash_attention_for_cpu(twin(query), twin(key), twin(value), dropout, causal, mask, scale);
  const auto device = query.device();
  Tensor seed = copy_to_device(at::zeros({}, at::kLong), device);
  return {copy_to_device(output, device), copy_to_device(log_sums, device), seed, seed};
}

static std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, const Tensor& output,
    const Tensor& log_sums, const Tensor&, const Tensor&, double dropout, std::array<bool, 4> wanted, bool causal, std::optional<double> scale) {
  TORCH_CHECK(!wanted[3], "the pretended GPU gives no gradient to a bias of attention");
  auto mask = bias.defined() ? std::optional<Tensor>(twin(bias)) : std::nullopt;
  auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      twin(gradient), twin(query), twin(key), twin(value), twin(output), twin(log_sums), dropout, causal, mask, scale);
  const auto device = query.device();
  return {copy_to_device(of_query, device), copy_to_device(of_key, device), copy_to_device(of_value, device), Tensor()};
}

static Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout, bool causal,
                        std::optional<double> scale, bool enable_gqa) {
  const bool is_plain = recording || !at::GradMode::is_enabled() || dropout > 0.0 || query.dim() != 4 ||
                        query.size(1) != key.size(1) || query.size(3) != value.size(3) ||
                        (mask && mask->defined() && mask->requires_grad());
  std::optional<Tensor> bias = mask;
  if (mask && mask->defined() && mask->scalar_type() == at::kBool) {
    bias = at::zeros_like(*mask, query.options()).masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity());
  }
  if (is_plain) {
    return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, bias, dropout, causal, std::nullopt, scale, enable_gqa));
  }
  return std::get<0>(at::_scaled_dot_product_efficient_attention(query, key, value, bias, true, dropout, causal, scale));
}

// CUDA counts integers, too; the CPU counts floating-point numbers alone.
static Tensor count_bins(const Tensor& self, int64_t bins, const Scalar& low, const Scalar& high) {
  const auto type = self.is_floating_point() ? self.scalar_type() : at::kDouble;
  Tensor counts = at::histc(twin(self).to(type), bins, low, high);
  return copy_to_device(counts.to(self.scalar_type()), self.device());
}

// oneDNN's product of fp8 is a reference that looks up the scales of each pair of elements: it takes fifty times as long as this.
static Tensor scaled_product(const Tensor& self, const Tensor& other, const Tensor& scale, const Tensor& other_scale, const std::optional<Tensor>& bias,
                             const std::optional<Tensor>& result_scale, std::optional<at::ScalarType> type, bool) {
  TORCH_CHECK(!(result_scale && result_scale->defined()), "the pretended GPU does not scale the result of a product of fp8");
  Tensor product = at::mm(self.to(at::kFloat), other.to(at::kFloat)) * scale * other_scale;
  if (bias && bias->defined()) product = product + *bias;
  return product.to(type.value_or(self.scalar_type()));
}

// CUDA alone multiplies half precision into a result of fp32.
static Tensor mm_into(const Tensor& self, const Tensor& other, ScalarType type) { return at::mm(self.to(type), other.to(type)); }
static Tensor bmm_into(const Tensor& self, const Tensor& other, ScalarType type) { return at::bmm(self.to(type), other.to(type)); }
static Tensor addmm_into(const Tensor& self, const Tensor& left, const Tensor& right, ScalarType type, const Scalar& beta, const Scalar& alpha) {
  return at::addmm(self.to(type), left.to(type), right.to(type), beta, alpha);
}
static Tensor baddbmm_into(const Tensor& self, const Tensor& left, const Tensor& right, ScalarType type, const Scalar& beta, const Scalar& alpha) {
  return at::baddbmm(self.to(type), left.to(type), right.to(type), beta, alpha);
}
static Tensor& mm_out_into(const Tensor& self, const Tensor& other, ScalarType type, Tensor& out) { return out.copy_(mm_into(self, other, type)); }
static Tensor& bmm_out_into(const Tensor& self, const Tensor& other, ScalarType type, Tensor& out) { return out.copy_(bmm_into(self, other, type)); }
static Tensor& addmm_out_into(const Tensor& self, const Tensor& left, const Tensor& right, ScalarType type, const Scalar& beta, const Scalar& alpha,
                              Tensor& out) {
  return out.copy_(addmm_into(self, left, right, type, beta, alpha));
}
static Tensor& baddbmm_out_into(const Tensor& self, const Tensor& left, const Tensor& right, ScalarType type, const Scalar& beta, const Scalar& alpha,
                                Tensor& out) {
  return out.copy_(baddbmm_into(self, left, right, type, beta, alpha));
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty_on_device);
  m.impl("empty_strided", empty_strided_on_device);
  m.impl("copy_", copy_between_devices);
  m.impl("resize_", resize_on_device);
  m.impl("histc", count_bins);
  m.impl("_scaled_mm", scaled_product);
  m.impl("mm.dtype", mm_into);
  m.impl("mm.dtype_out", mm_out_into);
  m.impl("bmm.dtype", bmm_into);
  m.impl("bmm.dtype_out", bmm_out_into);
  m.impl("addmm.dtype", addmm_into);
  m.impl("addmm.dtype_out", addmm_out_into);
  m.impl("baddbmm.dtype", baddbmm_into);
  m.impl("baddbmm.dtype_out", baddbmm_out_into);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("scaled_dot_product_attention", attention);
  m.impl("_scaled_dot_product_efficient_attention", efficient_attention);
  m.impl("_scaled_dot_product_efficient_attention_backward", efficient_attention_backward);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
}

TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("scaled_dot_product_attention", attention); }

// ---- the profiler: its events on the device hold the host's time ----

using Clock = std::chrono::steady_clock;

struct PretendedStubs : torch::profiler::impl::ProfilerStubs {
  void record(c10::DeviceIndex* device, torch::profiler::impl::ProfilerVoidEventStub* event, int64_t* cpu_ns) const override {
    if (device) *device = static_cast<c10::DeviceIndex>(active_device);
    *event = std::make_shared<Clock::time_point>(Clock::now());
    if (cpu_ns) *cpu_ns = c10::getTime();
  }
  float elapsed(const torch::profiler::impl::ProfilerVoidEventStub* start, const torch::profiler::impl::ProfilerVoidEventStub* end) const override {
    auto time = [](const auto* event) { return *static_cast<const Clock::time_point*>(event->get()); };
    return std::chrono::duration<float, std::micro>(time(end) - time(start)).count();
  }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> call) const override {
    for (int device = 0; device < device_count; ++device) call(device);
  }
  void synchronize() const override { arrive(); }
};

static PretendedStubs profiler_stubs;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(kCUDA, &allocator, 9);
  torch::profiler::impl::registerCUDAMethods(&profiler_stubs);
  m.def("initialize", [] { at::globalContext().lazyInitDevice(kCUDA); });
  m.def("set_device_count", [](int count) { device_count = count; });
  m.def("set_device", [](int device) { active_device = device; });
  m.def("current_device", [] { return active_device; });
  m.def("allocated_and_peak", [](int device) { return std::make_tuple(memory[device].allocated, memory[device].peak); });
  m.def("reset_peak", [](int device) { memory[device].peak = memory[device].allocated; });
  m.def("set_limit", [](int device, size_t bytes) { memory[device].limit = bytes; });
  m.def("limit_now", [](int device) { return limit_now(memory[device]); });
  m.def("set_left", [](size_t bytes, size_t copies) { left_bytes = bytes; left_after = copies; copies_to_host = 0; });
  m.def("host_waits", [] { std::lock_guard<std::mutex> lock(counters_lock); return host_waits; });
  m.def("operator_calls", [] { std::lock_guard<std::mutex> lock(counters_lock); return operator_calls; });
  m.def("clear_counters", [] { std::lock_guard<std::mutex> lock(counters_lock); host_waits.clear(); operator_calls.clear(); });
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def(py::init<>())
      .def("begin", [](std::shared_ptr<Graph> graph) { graph->calls.clear(); recording = graph; })
      .def("end", [](std::shared_ptr<Graph>) { recording.reset(); })
      .def("clear", [](std::shared_ptr<Graph> graph) { graph->calls.clear(); })
      .def("replay", [](std::shared_ptr<Graph> graph) { at::NoGradGuard no_grad; replay_graph(*graph); });
  m.def("resize_storage", [](py::object storage, size_t bytes) { resize_storage(torch::createStorage(storage.ptr()), bytes); });
  m.def("last_ticket", [] { std::lock_guard<std::mutex> lock(waiting_lock); return last_ticket; });
  m.def("arrive", [] { arrive(); });
  m.def("arrive_until", [](uint64_t ticket) { arrive(ticket); });
  m.def("pinned_bytes_and_peak", [] { std::lock_guard<std::mutex> lock(pinned_lock); return std::make_tuple(pinned_block_bytes, pinned_block_peak); });
  m.def("register_pinned", [](uint64_t address, uint64_t bytes) { register_pinned(reinterpret_cast<void*>(address), bytes); });
  m.def("unregister_pinned", [](uint64_t address) { unregister_pinned(reinterpret_cast<void*>(address)); });
  py::object backend = py::module_::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<PretendedNccl, c10::intrusive_ptr<PretendedNccl>>(m, "ProcessGroupNCCL", backend)
      .def(py::init([](py::object store, int rank, int size, py::object options) {
        py::object gloo = py::module_::import("torch._C._distributed_c10d").attr("ProcessGroupGloo")(store, rank, size, options.attr("_timeout"));
        return c10::make_intrusive<PretendedNccl>(rank, size, gloo.cast<c10::intrusive_ptr<c10d::Backend>>());
      }))
      .def_property_readonly("uid", [](const PretendedNccl&) { return 0; })
      .def("_add_ephemeral_timeout", [](PretendedNccl&, py::object) {});
  m.def("is_recording", [] { return bool(recording); });
}
