// A simulated accelerator in host memory: PrivateUse1 under the name "sim". Every operator without a kernel of its own
// runs the CPU's kernel on aliases of the tensors (same bytes, same strides), so numbers are the CPU's to the bit.
// Counted: what makes the host wait for a GPU (kinds "scalar", "sync", "d2h") and uploads ("h2d").
// Memory has a limit that a test may set; beyond it allocations raise torch.OutOfMemoryError.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <unordered_map>
#include <unordered_set>

namespace {
using c10::IValue;
constexpr auto SIM = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(SIM, 0);

// ---- counting
std::atomic<int64_t> kernels{0};
py::object* listener = nullptr;  // called as listener(kind, operator, bytes) under the GIL
void tell(const char* kind, const std::string& name, int64_t bytes) {
  if (!listener) return;
  py::gil_scoped_acquire gil;
  if (listener) (*listener)(kind, name, bytes);
}

// ---- memory
std::atomic<int64_t> in_use{0}, limit{-1}, peak{0};
void take(int64_t bytes) {
  const int64_t most = limit.load(), now = in_use += bytes;
  if (most >= 0 && now > most) {
    in_use -= bytes;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", bytes, " bytes of ", most);
  }
  if (now > peak.load()) peak = now;
}
struct Block {  // what one allocation holds
  void* memory;
  int64_t bytes;
};
void release(void* p) {
  auto* block = static_cast<Block*>(p);
  in_use -= block->bytes;
  if (block->memory) c10::GetCPUAllocator()->raw_deleter()(block->memory);
  delete block;
}
struct SimAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    take(n);
    auto* block = new Block{n ? c10::GetCPUAllocator()->raw_allocate(n) : nullptr, static_cast<int64_t>(n)};
    return {block->memory, block, &release, DEVICE};
  }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};
SimAllocator allocator;
REGISTER_ALLOCATOR(SIM, &allocator);

void drop(void* p) { delete static_cast<c10::Storage*>(p); }
void drop_result(void* p) {  // what a kernel of the CPU has allocated for the device
  in_use -= static_cast<int64_t>(static_cast<c10::Storage*>(p)->nbytes());
  drop(p);
}
c10::Storage alias(const c10::Storage& s, c10::Device device, c10::Allocator* a) {  // the same bytes on another device
  auto* keep = new c10::Storage(s);
  c10::DataPtr data(const_cast<void*>(s.data()), keep, &drop, device);
  return c10::Storage(c10::Storage::use_byte_size_t(), s.nbytes(), std::move(data), a, /*resizable=*/true);
}
at::Tensor shaped(c10::Storage s, c10::DispatchKey key, const at::Tensor& like) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(s), c10::DispatchKeySet(key), like.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return t;
}
at::Tensor on_cpu(const at::Tensor& t) {
  return shaped(alias(t.storage(), c10::kCPU, c10::GetCPUAllocator()), c10::DispatchKey::CPU, t);
}

// ---- random numbers: a CPU generator that calls itself one of the device
struct SimGenerator final : c10::GeneratorImpl {
  at::Generator inner;
  explicit SimGenerator(at::Generator g)
      : c10::GeneratorImpl(DEVICE, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(g)) {}
  void set_current_seed(uint64_t s) override { inner.set_current_seed(s); }
  void set_offset(uint64_t o) override { inner.set_offset(o); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& s) override { inner.unsafeGetGeneratorImpl()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  SimGenerator* clone_impl() const override { return new SimGenerator(inner.clone()); }
};
at::Generator new_generator() { return at::make_generator<SimGenerator>(at::detail::createCPUGenerator()); }
at::Generator& default_generator() {
  static at::Generator g = new_generator();
  return g;
}

// ---- the fallback
const std::unordered_set<std::string> WAITS{
    "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::repeat_interleave", "aten::bincount",
    "aten::_linalg_eigh", "aten::_linalg_svd", "aten::linalg_lstsq"};
const std::unordered_set<std::string> MIXES{"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"};

struct Call {
  std::string name;
  std::unordered_map<c10::StorageImpl*, c10::Storage> to_cpu;  // of the device -> alias
  std::unordered_map<c10::StorageImpl*, c10::Storage> to_sim;  // alias -> of the device
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;        // of the device, alias
  bool device = false;
  int64_t stray = -1;

  c10::Storage storage_down(const c10::Storage& s) {
    auto* key = s.unsafeGetStorageImpl();
    if (auto it = to_cpu.find(key); it != to_cpu.end()) return it->second;
    auto a = alias(s, c10::kCPU, c10::GetCPUAllocator());
    to_cpu.emplace(key, a);
    to_sim.emplace(a.unsafeGetStorageImpl(), s);
    return a;
  }
  c10::Storage storage_up(const c10::Storage& s) {
    auto* key = s.unsafeGetStorageImpl();
    if (auto it = to_sim.find(key); it != to_sim.end()) return it->second;
    take(s.nbytes());
    auto* keep = new c10::Storage(s);
    c10::DataPtr data(const_cast<void*>(s.data()), keep, &drop_result, DEVICE);
    c10::Storage a(c10::Storage::use_byte_size_t(), s.nbytes(), std::move(data), &allocator, /*resizable=*/true);
    to_sim.emplace(key, a);
    return a;
  }
  at::Tensor down(const at::Tensor& t, int64_t position) {
    if (!t.defined()) return t;
    if (t.device().type() != SIM) {
      if (t.dim() > 0 && t.device().is_cpu()) stray = position;
      return t;
    }
    device = true;
    for (auto& [mine, theirs] : pairs)
      if (mine.is_same(t)) return theirs;
    auto a = shaped(storage_down(t.storage()), c10::DispatchKey::CPU, t);
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) a.unsafeGetTensorImpl()->set_wrapped_number(true);
    pairs.emplace_back(t, a);
    return a;
  }
  at::Tensor up(const at::Tensor& t) {
    if (!t.defined() || !t.device().is_cpu()) return t;
    for (auto& [mine, theirs] : pairs)
      if (theirs.is_same(t)) return mine;
    return shaped(storage_up(t.storage()), c10::DispatchKey::PrivateUse1, t);
  }
  void settle() {  // what the kernel did to sizes or storages of its arguments (out=, resize_, set_)
    for (auto& [mine, theirs] : pairs) {
      auto* impl = mine.unsafeGetTensorImpl();
      auto s = theirs.storage();
      auto known = to_sim.find(s.unsafeGetStorageImpl());
      if (known == to_sim.end()) {
        impl->set_storage_keep_dtype(storage_up(s));
      } else {
        if (!known->second.is_alias_of(mine.storage())) impl->set_storage_keep_dtype(known->second);
        auto old = known->second;
        if (old.data() != s.data() || old.nbytes() != s.nbytes()) {
          auto* keep = new c10::Storage(s);
          old.set_data_ptr_noswap(c10::DataPtr(const_cast<void*>(s.data()), keep, &drop, DEVICE));
          old.set_nbytes(s.nbytes());
        }
      }
      if (mine.sizes() != theirs.sizes() || mine.strides() != theirs.strides() ||
          mine.storage_offset() != theirs.storage_offset())
        impl->set_sizes_and_strides(theirs.sizes(), theirs.strides(), theirs.storage_offset());
    }
  }
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto n = arguments.size(), begin = stack->size() - n;
  Call call;
  call.name = schema.name();
  kernels++;
  for (size_t i = 0; i < n; ++i) {
    IValue& v = (*stack)[begin + i];
    if (v.isTensor()) {
      v = call.down(v.toTensor(), i);
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> l;
      for (const at::Tensor& t : v.toTensorVector()) l.push_back(call.down(t, i));
      v = l;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> l;
      for (const auto& t : v.toOptionalTensorVector())
        l.push_back(t.has_value() ? std::optional<at::Tensor>(call.down(*t, i)) : std::nullopt);
      v = l;
    } else if (v.isStorage() && v.toStorage().device_type() == SIM) {
      call.device = true;
      v = call.storage_down(v.toStorage());
    } else if (v.isDevice() && v.toDevice().type() == SIM) {
      call.device = true;
      v = c10::Device(c10::kCPU);
    }
  }
  TORCH_CHECK(
      !(call.device && call.stray >= 0 && !MIXES.count(call.name)),
      "Expected all tensors to be on the same device, but found at least two devices, sim:0 and cpu! (when checking "
      "argument for argument ", arguments[call.stray < 0 ? 0 : call.stray].name(), " in method ", call.name, ")");
  for (size_t i = 0; i < n; ++i) {
    IValue& v = (*stack)[begin + i];
    if (v.isGenerator()) {
      auto g = v.toGenerator();
      TORCH_CHECK(g.device().type() == SIM, "Expected a 'sim' device type for generator but found '", g.device(), "'");
      v = IValue(static_cast<SimGenerator*>(g.unsafeGetGeneratorImpl())->inner);
    } else if (v.isNone() && call.device && arguments[i].type()->str() == "Generator?") {
      v = IValue(static_cast<SimGenerator*>(default_generator().unsafeGetGeneratorImpl())->inner);
    }
  }
  if (WAITS.count(call.name)) tell("sync", call.name, 0);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  call.settle();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    IValue& v = (*stack)[i];
    if (v.isTensor()) {
      v = call.up(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> l;
      for (const at::Tensor& t : v.toTensorVector()) l.push_back(call.up(t));
      v = l;
    }
  }
}

// ---- kernels of its own
at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
at::Tensor zero_tensor(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                       std::optional<at::Device> device, std::optional<bool> pinned) {  // forward mode's zeros, with memory
  return empty(size, dtype, layout, device, pinned, std::nullopt).zero_();
}
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  const bool up = to.device().type() == SIM, down = from.device().type() == SIM;
  if (down && !up) tell("d2h", "copy", from.nbytes());
  if (up && !down) tell("h2d", "copy", from.nbytes());
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor target = up ? on_cpu(to) : to;
  target.copy_(down ? on_cpu(from) : from);
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar local_scalar_dense(const at::Tensor& t) {
  tell("scalar", "_local_scalar_dense", t.nbytes());
  at::AutoDispatchBelowADInplaceOrView below;
  return at::_local_scalar_dense(on_cpu(t));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("_efficientzerotensor", &zero_tensor);
  // composite ones that choose by the device's type, and would choose kernels that do not exist
  for (auto name : {"convolution", "convolution_backward", "native_layer_norm", "native_group_norm", "addr", "_stack"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// ---- autocast: the usual lists of operators
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define OPT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(OPT)
  AT_FORALL_PROMOTE(PROMOTE)
}

// ---- what the framework asks of a device
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return SIM; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream getNewStream(c10::Device, int) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream exchangeStream(c10::Stream) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { tell("sync", "synchronizeStream", 0); }
  void synchronizeEvent(void*) const override { tell("sync", "synchronizeEvent", 0); }
  void synchronizeDevice(const c10::DeviceIndex) const override { tell("sync", "synchronizeDevice", 0); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    auto fresh = allocator.allocate(n);
    if (s.data()) std::memcpy(fresh.get(), s.data(), std::min(n, s.nbytes()));
    const_cast<c10::Storage&>(s).set_data_ptr_noswap(std::move(fresh));
    const_cast<c10::Storage&>(s).set_nbytes(n);
  }
};
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("default_generator", [] { return default_generator(); });
  m.def("kernels", [] { return kernels.load(); });
  m.def("set_memory_limit", [](int64_t bytes) { limit = bytes; });
  m.def("memory_allocated", [] { return in_use.load(); });
  m.def("max_memory_allocated", [] { return peak.load(); });
  m.def("reset_peak_memory_stats", [] { peak = in_use.load(); });
  m.def("memory_limit", [] { return limit.load(); });
  m.def("listen", [](py::object f) {
    auto* old = listener;
    listener = f.is_none() ? nullptr : new py::object(std::move(f));
    delete old;
  });
}
