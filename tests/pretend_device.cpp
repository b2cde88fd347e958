// A device type whose tensors live in the memory of the CPU and refuse, as CUDA's do, to meet tensors of the CPU.
//
// Views are made by the CPU's own kernels, which touch no memory; every other operator runs the CPU's kernel on the
// same memory, after `refuse_mixing`.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

namespace {

const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = bytes ? std::malloc(bytes) : nullptr;
    return {pointer, pointer, &std::free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &memory);

// One device, one stream, nothing to wait for.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getNewStream(c10::Device, int) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream exchangeStream(c10::Stream) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Random : at::CPUGeneratorImpl {
  explicit Random(uint64_t seed = c10::detail::getNonDeterministicRandom()) : at::CPUGeneratorImpl(seed) {
    device_ = kDevice;
    key_set_ = kKeys;
  }
  Random* clone_impl() const override {
    auto* copy = new Random(0);
    copy->set_state(*get_state());
    return copy;
  }
  // A state that no generator of the CPU takes, and the other way round.
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto mine = at::Tensor(at::CPUGeneratorImpl::get_state());
    return at::cat({mine, at::zeros({kMark}, mine.options())}).getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    auto tensor = at::Tensor(const_cast<c10::TensorImpl&>(state).shallow_copy_and_detach(state.version_counter(), false));
    auto whole = at::Tensor(at::CPUGeneratorImpl::get_state()).numel() + kMark;
    TORCH_CHECK(tensor.numel() == whole, "RNG state is wrong size");
    at::CPUGeneratorImpl::set_state(*tensor.slice(0, 0, whole - kMark).clone().unsafeGetTensorImpl());
  }
  static constexpr int64_t kMark = 8;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Random>(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator global = at::make_generator<Random>();
    return global;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto grown = memory.allocate(bytes);
    if (bytes && impl->data()) std::memcpy(grown.get(), impl->data(), std::min(bytes, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(grown));
    impl->set_nbytes(bytes);
  }
};

bool here(const at::Tensor& tensor) { return tensor.defined() && tensor.device() == kDevice; }

at::Tensor as_cpu(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype());
  auto alias = at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  at::Tensor made = at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, kKeys, c10::dtype_or_default(dtype), format);
  return made;
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           kKeys, c10::dtype_or_default(dtype));
}

at::Tensor as_device(const at::Tensor& cpu) {
  at::Tensor made = at::detail::empty_strided_generic(cpu.sizes(), cpu.strides(), &memory, kKeys, cpu.scalar_type());
  if (cpu.is_conj()) made._set_conj(true);
  as_cpu(made).copy_(cpu);
  return made;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& to, bool) {
  (here(to) ? as_cpu(to) : to).copy_(here(source) ? as_cpu(source) : source);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& to) {
  to.resize_(source.sizes());
  return copy_from(source, to, false);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  size_t bytes = (c10::multiply_integers(sizes) + self.storage_offset()) * self.element_size();
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  impl->set_sizes_contiguous(sizes);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  TORCH_CHECK(storage.device() == kDevice, "Expected a storage on ", kDevice, ", got one on ", storage.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  if (stride.empty() && !size.empty()) impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  else impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  int64_t size = storage.nbytes() / self.element_size(), one = 1;
  return set_storage(self, std::move(storage), 0, c10::SymIntArrayRef(c10::fromIntArrayRefSlow(size)), c10::fromIntArrayRefSlow(one));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), c10::fromIntArrayRefSlow(source.sizes()),
                     c10::fromIntArrayRefSlow(source.strides()));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return as_strided(self, size, stride, std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Scalar item(const at::Tensor& self) { return as_cpu(self).item(); }

at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  TORCH_CHECK(here(x) && here(weight), "Expected all tensors to be on the same device (convolution)");
  std::optional<at::Tensor> b = bias && bias->defined() ? std::optional(as_cpu(*bias)) : std::nullopt;
  return as_device(at::convolution(as_cpu(x), as_cpu(weight), b, stride, padding, dilation, transposed, output_padding,
                                   groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> wanted) {
  auto [a, b, c] = at::convolution_backward(as_cpu(gradient), as_cpu(x), as_cpu(weight), at::IntArrayRef(weight.size(0)),
                                            stride, padding, dilation, transposed, output_padding, groups, wanted);
  return {a.defined() ? as_device(a) : a, b.defined() ? as_device(b) : b, c.defined() ? as_device(c) : c};
}

// As on CUDA a tensor without dimensions may come from the CPU, and indices may; what is written may not.
void refuse_mixing(const std::string& name, const at::Tensor& tensor, bool written, bool listed) {
  static const std::set<std::string> strict = {"aten::cat", "aten::stack", "aten::index_select", "aten::gather",
                                               "aten::mm", "aten::bmm", "aten::addmm", "aten::embedding"};
  static const std::set<std::string> indexed = {"aten::index", "aten::index_put_", "aten::index_put",
                                                "aten::_index_put_impl_", "aten::_unsafe_index"};
  if (!tensor.defined() || here(tensor) || tensor.is_meta()) return;
  if (listed && indexed.count(name)) return;
  if (!written && tensor.dim() == 0 && !strict.count(name)) return;
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", kDevice,
              " and ", tensor.device(), " (", name, ")");
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto name = schema.name();
  const size_t count = schema.arguments().size();
  const size_t first = stack->size() - count;
  std::vector<std::pair<at::Tensor, at::Tensor>> moved;     // of the device, of the CPU
  std::map<size_t, at::Tensor> written;                     // argument -> of the device
  std::optional<std::pair<at::Generator, at::Generator>> random;

  auto move = [&](const at::Tensor& tensor, bool write, bool listed, bool output) {
    refuse_mixing(name, tensor, write, listed);
    if (!here(tensor)) return tensor;
    // An empty output is made anew, since the kernel may want to resize it.
    auto cpu = output && tensor.numel() == 0 ? at::empty({0}, at::TensorOptions().dtype(tensor.dtype())) : as_cpu(tensor);
    moved.emplace_back(tensor, cpu);
    return cpu;
  };
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[first + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool write = alias && alias->isWrite();
    const bool output = schema.arguments()[i].is_out();
    if (value.isTensor()) {
      auto tensor = value.toTensor();
      if (write) written[i] = tensor;
      value = move(tensor, write, false, output);
    } else if (value.isTensorList()) {
      auto list = c10::List<at::Tensor>();
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(move(tensor, write, true, output));
      value = list;
    } else if (value.isOptionalTensorList()) {
      auto list = c10::List<std::optional<at::Tensor>>();
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional(move(*tensor, write, true, output)) : std::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kDevice.type()) {
      value = c10::Device(c10::DeviceType::CPU);
    } else if (value.isGenerator()) {
      auto given = value.toGenerator();
      TORCH_CHECK(given.device() == kDevice, "Expected a '", kDevice, "' device type for generator but found '",
                  given.device(), "' (", name, ")");
      auto cpu = at::make_generator<at::CPUGeneratorImpl>();
      cpu.set_state(given.get_state().slice(0, 0, -Random::kMark).clone());
      random.emplace(given, cpu);
      value = cpu;
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (random) {
    auto state = random->second.get_state();
    random->first.set_state(at::cat({state, at::zeros({Random::kMark}, state.options())}));
  }
  for (auto& [device, cpu] : moved) {
    if (device.sizes() != cpu.sizes()) {
      device.resize_(cpu.sizes());
      as_cpu(device).copy_(cpu);
    }
  }
  auto back = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    for (auto& [device, cpu] : moved)
      if (tensor.is_same(cpu)) return device;
    for (auto& [device, cpu] : moved)
      if (tensor.storage().is_alias_of(cpu.storage()) && tensor.numel() && cpu.dtype() == tensor.dtype())
        return at::native::as_strided_tensorimpl(device, tensor.sizes(), tensor.strides(),
                                                 device.storage_offset() + tensor.storage_offset());
    return as_device(tensor);
  };
  const size_t results = stack->size() - schema.returns().size();
  for (size_t i = results; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = back(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = c10::List<at::Tensor>();
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(back(tensor));
      value = list;
    }
  }
}

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

TORCH_LIBRARY(pretend, m) {
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(logsumexp, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("_local_scalar_dense", TORCH_FN(item));
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
}
