// Operators of the virtual device: those of the CPU, on the stream's thread. What a task of a stream reads and writes
// is memory alone, which it does not keep: who frees a tensor too early is found.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "memory.h"
#include "pinned.h"

namespace virtual_device {

// As CUDA's: a seed, and an offset that every op that draws moves on when it is queued.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex device)
      : GeneratorImpl({kType, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(std::random_device{}());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    const auto* numbers = static_cast<const uint64_t*>(state.data());
    seed_ = numbers[0], offset_ = numbers[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const at::Tensor state = at::empty({16}, at::kByte);
    auto* numbers = static_cast<uint64_t*>(state.mutable_data_ptr());
    numbers[0] = seed_, numbers[1] = offset_;
    return state.getIntrusivePtr();
  }
  // A generator of the CPU for one op.
  at::Generator next() {
    const std::lock_guard lock(mutex_);
    return at::detail::createCPUGenerator((seed_ * 0x9E3779B97F4A7C15ull) ^ (offset_ += 4));
  }
  static const at::Generator& of(c10::DeviceIndex device) {
    static const auto* const all = [] {
      auto* made = new std::vector<at::Generator>();
      for (int each = 0; each < kDevices; ++each) made->push_back(at::make_generator<Generator>(each));
      return made;
    }();
    return all->at(device < 0 ? current_device : device);
  }

 private:
  Generator* clone_impl() const override {
    auto* const copy = new Generator(device().index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return Generator::of(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }
  bool isPinnedPtr(const void* data) const override { return Pinned::instance().has(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &Pinned::instance(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const size_t kept = std::min(bytes, storage.nbytes());
    c10::DataPtr data = allocator().allocate(bytes);
    if (kept) allocator().copy_data(data.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};

inline bool is_ours(const at::Tensor& x) { return x.defined() && x.device().type() == kType; }

// The same memory as a tensor of the CPU, which does not keep it; a copy of a number that the host gave.
inline at::Tensor on_cpu(const at::Tensor& x) {
  if (!is_ours(x)) return x.defined() && x.dim() == 0 && x.is_cpu() ? x.clone() : x;
  char* const data = static_cast<char*>(const_cast<void*>(x.storage().data()));
  const auto options = at::TensorOptions().dtype(x.scalar_type());
  if (!data) return at::empty_strided(x.sizes(), x.strides(), options);
  return at::from_blob(data + x.storage_offset() * x.element_size(), x.sizes(), x.strides(), options);
}
inline at::Tensor on_meta(const at::Tensor& x) {
  return x.defined() ? at::empty_strided(x.sizes(), x.strides(), x.options().device(at::kMeta)) : x;
}
inline at::Tensor made_like(const at::Tensor& x) {
  if (!x.defined()) return x;
  return at::empty_strided(x.sizes(), x.strides(), x.options().device(c10::Device(kType, current_device)));
}

template <typename Function>
c10::IValue mapped(const c10::IValue& value, c10::DeviceType device, const Function& function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> all;
    for (const at::Tensor& each : value.toTensorVector()) all.push_back(function(each));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList().vec())
      all.push_back(each ? std::optional(function(*each)) : each);
    return all;
  }
  if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(device);
  return value;
}

template <typename Function>
void for_each_tensor(const c10::IValue& value, const Function& function) {
  mapped(value, kType, [&](const at::Tensor& x) {
    if (x.defined()) function(x);
    return x;
  });
}

// Of an op's tensors, which are on one device.
inline c10::DeviceIndex device_of(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
  c10::DeviceIndex found = -1;
  for (const auto& value : arguments)
    for_each_tensor(value, [&](const at::Tensor& x) {
      if (!is_ours(x)) return;
      TORCH_CHECK(found < 0 || found == x.get_device(), op.schema().name(), ": tensors of devices ",
                  int(found), " and ", int(x.get_device()));
      found = x.get_device();
    });
  return found < 0 ? current_device : found;
}

inline void begin(Stream& stream, double& clock) {
  stream.delay();
  clock += settings.op_seconds;
}

inline void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::NoGradGuard no_grad;
  op.callBoxed(&stack);
}

// Gives outputs that an op was to resize their sizes before it is queued: it runs on memory that has its size.
inline void fit_outputs(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments,
                        torch::jit::Stack& cpu) {
  const auto& declared = op.schema().arguments();
  const auto is_output = [&](size_t i) {
    return declared[i].is_out() && arguments[i].isTensor() && is_ours(arguments[i].toTensor()) &&
           arguments[i].toTensor().numel() == 0;
  };
  bool some = false;
  torch::jit::Stack shapes;
  for (size_t i = 0; i < arguments.size(); ++i) {
    some |= is_output(i);
    shapes.push_back(mapped(arguments[i], at::kMeta, on_meta));
  }
  if (!some) return;
  const torch::jit::Stack meta = shapes;  // the op takes its own from the stack
  op.callBoxed(&shapes);
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!is_output(i) || meta[i].toTensor().sizes() == arguments[i].toTensor().sizes()) continue;
    const at::Tensor& x = arguments[i].toTensor();
    const at::Tensor& fitting = meta[i].toTensor();
    if (fitting.nbytes() > x.storage().nbytes())
      at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(x.storage(), fitting.nbytes());
    x.unsafeGetTensorImpl()->set_sizes_and_strides(fitting.sizes(), fitting.strides());
    cpu[i] = on_cpu(x);
  }
}

// Any op that has a kernel of the CPU. Queued, if its results' shapes are known without its values.
inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const std::vector<c10::IValue> arguments(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);
  const c10::DeviceGuard guard({kType, device_of(op, arguments)});
  Stream& stream = current_stream(current_device);
  load(current_device, schema.name() + schema.overload_name());

  torch::jit::Stack cpu;
  bool writes = false;
  for (size_t i = 0; i < count; ++i) {
    cpu.push_back(mapped(arguments[i], at::kCPU, on_cpu));
    const auto& argument = schema.arguments()[i];
    writes |= argument.alias_info() && argument.alias_info()->isWrite();
    if (argument.type()->str().find("Generator") == std::string::npos) continue;
    const at::Generator given =
        arguments[i].isNone() ? Generator::of(current_device) : arguments[i].toGenerator();
    if (given.device().type() == kType)
      cpu[i] = static_cast<Generator*>(given.unsafeGetGeneratorImpl())->next();
  }
  // Which argument is the result, or -1.
  std::vector<int64_t> same;
  bool known = !schema.returns().empty() || writes;
  for (const auto& result : schema.returns()) {
    same.push_back(-1);
    for (size_t i = 0; i < count && result.alias_info(); ++i) {
      const auto* const info = schema.arguments()[i].alias_info();
      if (info && info->beforeSets() == result.alias_info()->beforeSets()) same.back() = i;
    }
    known &= same.back() >= 0 || (!writes && (result.type()->isSubtypeOf(*c10::TensorType::get()) ||
                                              result.type()->isSubtypeOf(*c10::ListType::ofTensors())));
  }
  if (known && writes) fit_outputs(op, arguments, cpu);
  std::vector<c10::IValue> results;
  if (known && !writes) {
    torch::jit::Stack shapes;
    for (const auto& value : arguments) shapes.push_back(mapped(value, at::kMeta, on_meta));
    try {
      op.callBoxed(&shapes);
    } catch (const std::exception&) {  // they depend on values
      known = false;
    }
    results = std::move(shapes);
  }
  if (!known) {
    synchronize(stream);
    run(op, cpu);
    for (size_t i = 0; i < same.size(); ++i) {
      stack->push_back(same[i] >= 0 ? arguments[same[i]] : mapped(cpu[i], kType, [](const at::Tensor& x) {
        const at::Tensor made = made_like(x);
        if (x.defined() && x.numel()) {
          synchronize(current_stream(current_device));  // new memory is overwritten first
          on_cpu(made).copy_(x);
        }
        return made;
      }));
    }
    return;
  }
  torch::jit::Stack into;
  for (size_t i = 0; i < same.size(); ++i) {
    stack->push_back(same[i] >= 0 ? arguments[same[i]] : mapped(results[i], kType, made_like));
    into.push_back(same[i] >= 0 ? c10::IValue() : mapped(stack->back(), at::kCPU, on_cpu));
  }
  stream.put([op, cpu, into, &stream](double& clock) {
    begin(stream, clock);
    torch::jit::Stack values = cpu;
    run(op, values);
    for (size_t i = 0; i < into.size(); ++i) {
      std::vector<at::Tensor> from, to;
      for_each_tensor(into[i], [&](const at::Tensor& x) { to.push_back(x); });
      if (to.empty()) continue;
      for_each_tensor(values[i], [&](const at::Tensor& x) { from.push_back(x); });
      for (size_t k = 0; k < to.size(); ++k) to[k].copy_(from[k]);
    }
  });
}

using Sizes = c10::SymIntArrayRef;
inline c10::Device device_or_current(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : c10::Device(kType, current_device);
}
inline at::Tensor empty(Sizes size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                        std::optional<c10::Device> device, std::optional<bool>,
                        std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
inline at::Tensor empty_strided(Sizes size, Sizes stride, std::optional<c10::ScalarType> dtype,
                                std::optional<c10::Layout>, std::optional<c10::Device> device,
                                std::optional<bool>) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
inline at::Tensor as_strided(const at::Tensor& self, Sizes size, Sizes stride,
                             std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional(offset->expect_int()) : std::nullopt);
}
inline at::Tensor view(const at::Tensor& self, Sizes size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
inline at::Tensor reshape_alias(const at::Tensor& self, Sizes size, Sizes stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
// The host waits for a copy from or to its own memory, unless that is pinned.
inline at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  const c10::DeviceGuard guard(is_ours(to) ? to.device() : self.device());
  Stream& stream = current_stream(current_device);
  const auto& host = is_ours(to) ? self : to;
  stream.put([from = on_cpu(self), into = is_ours(to) ? on_cpu(to) : to, &stream](double& clock) {
    begin(stream, clock);
    const at::AutoDispatchBelowADInplaceOrView below;
    into.copy_(from);
  });
  if (!is_ours(host) && !(non_blocking && Pinned::instance().has(host.storage().data()))) synchronize(stream);
  return to;
}
inline at::Scalar item(const at::Tensor& self) {
  synchronize(current_stream(self.get_device()));
  return on_cpu(self).item();
}
inline void record_stream(at::Tensor& self, c10::Stream stream) {
  record_use(self.storage().data_ptr(), stream);
}
// The mask and its use are two ops: the CPU's dropout knows only the default generator.
inline std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& x, double p,
                                                         std::optional<bool> train) {
  if (p == 0 || (train && !*train)) return {x.clone(), at::ones_like(x, at::kBool)};
  const at::Tensor kept = at::empty_like(x, at::kBool).bernoulli_(1 - p);
  return {x * kept * (p < 1 ? 1 / (1 - p) : 0.0), kept};
}
inline int64_t attention_of_products(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                     const std::optional<at::Tensor>&, double, bool, std::optional<double>,
                                     bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("_copy_from", copy_from);
  library.impl("_local_scalar_dense", item);
  library.impl("record_stream", record_stream);
  library.impl("native_dropout", native_dropout);
  library.impl("_fused_sdp_choice", attention_of_products);
}

}  // namespace virtual_device
