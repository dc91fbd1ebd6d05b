// Two devices of the type PrivateUse1, whose memory is the host's. Operations run on the CPU.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <cstdlib>
#include <cstring>

namespace {
constexpr auto kind = c10::DeviceType::PrivateUse1;
thread_local c10::DeviceIndex current = 0;

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? std::malloc(bytes) : nullptr;
    return {data, data, &std::free, c10::Device(kind, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override { std::memcpy(target, source, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(kind, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kind; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kind, current); }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}  // nothing waits
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 2; }
};
const bool registered = [] { at::RegisterPrivateUse1HooksInterface(new Hooks); return true; }();

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device->has_index() ? *device : c10::Device(kind, current));
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device->has_index() ? *device : c10::Device(kind, current));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor on_cpu(const at::Tensor& t) {  // the same memory
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU));
}
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  auto from = source.is_cpu() ? source : on_cpu(source);
  auto to = target.is_cpu() ? target : on_cpu(target);
  to.copy_(from);
  return target;
}
const at::Tensor& resize(const at::Tensor& t, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  const c10::DeviceGuard guard(t.device());
  auto* storage = t.storage().unsafeGetStorageImpl();
  const size_t bytes = c10::multiply_integers(size) * t.element_size();
  if (bytes > storage->nbytes()) {
    storage->set_data_ptr(memory.allocate(bytes));
    storage->set_nbytes(bytes);
  }
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return t;
}
at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (source.sizes() != target.sizes()) resize(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::optional<at::Device> first;
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const auto& t = value.toTensor();
    if (t.is_cpu() && t.dim() == 0) continue;
    if (!first) first = t.device();
    TORCH_CHECK(*first == t.device(), op.schema().name(), ": tensors on ", *first, " and ", t.device());
  }
  at::native::cpu_fallback(op, stack);
}
}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("view", at::native::view);
}
